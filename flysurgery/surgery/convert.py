"""Plan, choose and apply in one call."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

from torch import nn

from flysurgery.calibration import Data, samples_of
from flysurgery.fidelity import Progress
from flysurgery.surgery.allocation import PLACEHOLDER, allocate, check_budget, convert_to_fidelity
from flysurgery.surgery.apply import apply, check_calibration, sample_shape
from flysurgery.surgery.choices import Measurement, Tradeoff
from flysurgery.surgery.choosing import Setting, choose_measured
from flysurgery.surgery.plan import Plan
from flysurgery.surgery.planning import plan as make_plan
from flysurgery.surgery.report import Report


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
    setting = Setting() if measure is True else measure or None
    tradeoff = measurement = None
    named = [name for name in ("nblocks", "rank", "patterns", "per_layer") if options.get(name) is not None]
    check_calibration(calibrate, fidelity=fidelity)
    fitting = {"init": init, "sequential": sequential, "permute": permute, "reconstruct": reconstruct, "seed": seed}
    named = named if arch is None else [*named, "arch"]
    if not check_budget(budget, measured=setting is not None, named=named, fidelity=fidelity):
        plan = make_plan(model, arch or "monarch", **options)
    else:
        plan = make_plan(model, PLACEHOLDER, **options)
        if calibrate is not None:  # the same samples for the choice and for the fit
            calibrate = samples_of(calibrate, count=samples, shape=sample_shape(plan))
        given = {"calibrate": calibrate, "samples": samples, "progress": progress}
        if fidelity is not None:
            return convert_to_fidelity(plan, model, fidelity, verify=verify, **given, **fitting)
        plan, tradeoff, measurement = choose(plan, model, setting, budget, **given)
    report = apply(plan, model, calibrate=calibrate, samples=samples, progress=progress, verify=verify, **fitting)
    return replace(report, tradeoff=tradeoff, measurement=measurement)


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
