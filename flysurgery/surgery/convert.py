"""Plan, choose and apply in one call."""

import copy
from dataclasses import replace
from typing import Any, Literal

from torch import nn

from flysurgery.calibration import Data, samples_of
from flysurgery.errors import OptionError, PlanError
from flysurgery.fidelity import Progress
from flysurgery.surgery.allocation import PLACEHOLDER, allocate, check_budget, prepare
from flysurgery.surgery.apply import apply, check_calibration, install, sample_shape
from flysurgery.surgery.choices import Measurement, Tradeoff
from flysurgery.surgery.make_plan import plan as make_plan
from flysurgery.surgery.measuring import Setting, choose_measured
from flysurgery.surgery.plan import Plan
from flysurgery.surgery.report import Report

TRIES = 5
"""How often a copy is converted to reach a fidelity. The last step between budgets is a 32nd of the distance from the smallest to all."""


def convert(
    model: nn.Module,
    arch: str | None = None,
    *,
    init: Literal["projection", "random"] = "projection",
    calibrate: Data | None = None,
    samples: int | None = None,
    sequential: bool = False,
    permute: bool = False,
    reconstruct: bool | float = False,
    seed: int = 0,
    progress: Progress | None = None,
    verify: bool = True,
    budget: float | None = None,
    fidelity: float | None = None,
    measure: Setting | bool = False,
    **options: Any,
) -> Report:
    """Plan and apply in one call. ``options`` are those of ``plan``, the named arguments those of ``apply``. Raises what they raise.

    ``arch`` is "monarch" by default. With a ``budget``, ``allocate`` chooses the architecture of each layer, and ``arch`` and its options
    must not be given. With a ``fidelity``, ``convert_to_fidelity`` finds the budget. ``measure`` times all choices where the model is:
    True, or a ``Setting`` with batch and dtype. Then each layer gets the most accurate of what is faster than dense, or the ``budget``
    bounds milliseconds; see ``choose_measured``.
    """
    if not isinstance(measure, Setting | bool):
        raise OptionError(f"measure is True or a Setting, got {measure!r}")
    setting = Setting() if measure is True else measure or None
    tradeoff = measurement = None
    named = [name for name in ("nblocks", "rank", "patterns", "per_layer") if options.get(name) is not None]
    check_calibration(calibrate, fidelity=fidelity)
    fitting = {"init": init, "sequential": sequential, "permute": permute, "reconstruct": reconstruct, "seed": seed, "verify": verify}
    named = named if arch is None else [*named, "arch"]
    chosen = check_budget(budget, measured=setting is not None, named=named, fidelity=fidelity)
    plan = make_plan(model, PLACEHOLDER if chosen else arch or "monarch", **options)
    if chosen and calibrate is not None:  # the same samples for the choice and for the fit
        calibrate = samples_of(calibrate, count=samples, shape=sample_shape(plan))
    given = {"calibrate": calibrate, "samples": samples, "progress": progress}
    if fidelity is not None:
        return convert_to_fidelity(plan, model, fidelity, **given, **fitting)
    if chosen:
        plan, tradeoff, measurement = choose(plan, model, setting, budget, **given)
    return replace(apply(plan, model, **given, **fitting), tradeoff=tradeoff, measurement=measurement)


def choose(
    plan: Plan, model: nn.Module, setting: Setting | None, budget: float | None, **given: Any
) -> tuple[Plan, Tradeoff, Measurement | None]:
    """``plan`` with a choice for each layer: by times measured in ``setting``, or without one by weights, within the ``budget``.

    ``given`` has what both ways take: ``calibrate``, ``samples``, ``progress``. Raises what ``choose_measured`` and ``allocate`` raise.
    """
    if setting is not None:
        return choose_measured(plan, model, setting, budget=budget, **given)
    assert budget is not None  # without one, and without measuring, there is nothing to choose by
    return *allocate(plan, model, budget=budget, **given), None


def convert_to_fidelity(
    plan: Plan,
    model: nn.Module,
    fidelity: float,
    *,
    calibrate: Data,
    samples: int | None = None,
    progress: Progress | None = None,
    **fitting: Any,
) -> Report:
    """Replace the layers that ``plan`` replaces, in place, by as few weights as ``fidelity`` allows; gives the report of ``apply``.

    A copy is converted ``TRIES`` times, for budgets that close in on the smallest one at which the lower of the output's and the tokens'
    cosine with the dense model is at least ``fidelity``, on the held-out samples of the report. The model gets the weights of the
    smallest copy that is close enough. ``fitting`` are the options of ``apply``. As the budget is chosen by the held-out samples, the
    fidelity on others may be a little lower.

    Cost: that of ``allocate`` and of ``TRIES`` conversions, and memory for two copies of the model.

    Raises:
        PlanError: no copy is close enough; the message says how close the best one is. The model is as it was.
        What ``allocate`` and ``apply`` raise.
    """
    taken = samples_of(calibrate, count=samples, shape=sample_shape(plan))
    given = {"calibrate": taken, "samples": samples, "progress": progress}
    allocation = prepare(plan, model, **given)
    low, high, best = allocation.least, 1.0, 0.0
    found: tuple[Plan, nn.Module, Report] | None = None
    for _ in range(TRIES):
        budget = (low + high) / 2
        picks = allocation.pick(budget)
        candidate, converted = allocation.plan_of(picks), copy.deepcopy(model)
        report = apply(candidate, converted, **given, **fitting)
        reached = 0.0 if report.fidelity is None else report.fidelity.lowest_cosine
        best = max(best, reached)
        if reached >= fidelity:
            high, found = budget, (candidate, converted, replace(report, tradeoff=allocation.tradeoff(picks, budget)))
        else:
            low = budget
    if found is None:
        raise PlanError(
            f"no choice with up to {low:.0%} of the weights reaches a cosine of {fidelity:g}; the closest has {best:.4f}; "
            "give --reconstruct (reconstruct=True), more minutes, more images, or a lower goal"
        )
    candidate, converted, report = found
    install(candidate, model)
    model.load_state_dict(converted.state_dict())
    return report
