"""Share a budget among the layers of a plan: each gets the architecture that suits all of them together."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from flysurgery.calibration import Data
from flysurgery.errors import DataError, OptionError, PlanError
from flysurgery.surgery.allocation import DENSE, STEPS, Allocation, Trials, within
from flysurgery.surgery.apply import apply, check_calibration
from flysurgery.surgery.candidates import named_candidates, read_latency_table
from flysurgery.surgery.check import check_plan, check_weights
from flysurgery.surgery.choices import Search, TimedGroup, Tradeoff
from flysurgery.surgery.lagrangian import least_cost, least_error_but_first
from flysurgery.surgery.option_errors import Option, Unit, judge, look
from flysurgery.surgery.plan import LayerPlan, Plan, Reason
from flysurgery.surgery.projecting import Progress

AUTO = "auto"
"""In place of a family: an allocation chooses among all of them."""

PLACEHOLDER = "lowrank"
"""The family to plan with before an allocation: it fits matrices of any sizes."""


@dataclass(frozen=True)
class FidelityGoal:
    """The ``target`` for the output and token cosine, and the options that ``apply`` will have.

    Raises:
        OptionError: a target that is no cosine between 0 and 1.
    """

    target: float
    sequential: bool = False
    permute: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.target < 1:
            raise OptionError(f"fidelity is the cosine to reach, above 0 and below 1; got {self.target!r}")


def is_chosen(arch: str, goal: Mapping[str, Any], named: Sequence[str], *, measured: bool) -> bool:
    """Whether an allocation chooses the architectures. ``goal`` is that of ``check_budget``; ``named`` are options that name architectures.

    Raises:
        OptionError: ``arch`` "auto" without a goal, ``named`` options or another ``arch`` beside one, or as ``check_budget`` does.
    """
    if not measured and all(value is None for value in goal.values()):
        if arch == AUTO:
            raise OptionError(f"arch '{AUTO}' needs what it is to choose by; give measure, a budget, max-error, latency or fidelity")
        return False
    check_budget(**goal, measured=measured)
    given = [*named, *([] if arch in ("monarch", AUTO) else ["arch"])]
    if given:
        raise OptionError(
            f"measure, budget, max-error, latency and fidelity choose the architectures, so {' and '.join(given)} cannot be given with them"
        )
    return True


def check_budget(
    budget: float | None,
    max_error: float | None,
    latency: Path | None,
    *,
    fidelity: float | None = None,
    ms: float | None = None,
    measured: bool = False,
) -> None:
    """Raise ``OptionError`` unless exactly one of ``budget``, ``max_error``, ``fidelity`` and ``ms`` is given, and is in its range.

    With ``measured`` times, none of them is needed and a latency table is refused. ``ms`` needs measured times.
    """
    bounds = {"budget": budget, "max-error": max_error, "fidelity": fidelity, "ms": ms}
    given = [name for name, value in bounds.items() if value is not None]
    if len(given) > 1:
        raise OptionError(f"{' and '.join(given)} are different goals, and each makes the rest best for its own; give one of them")
    if measured and latency is not None:
        raise OptionError("a latency table has the times that measuring would find; give one of the two")
    if not given and not measured:
        if latency is not None:
            raise OptionError("a latency table needs a budget, which is a share of the dense ms, max-error or fidelity; give one of them")
        raise OptionError("an allocation needs a budget, max-error or fidelity; give one of them")
    if budget is not None and not 0 < budget <= 1:
        raise OptionError(f"budget is the share of the dense layers' costs to keep, above 0 and at most 1; got {budget!r}")
    if max_error is not None and not 0 < max_error < 1:
        raise OptionError(f"max-error is a relative error, above 0 and below 1; got {max_error!r}")
    if fidelity is not None:
        FidelityGoal(fidelity)
    if ms is not None and not measured:
        raise OptionError("ms are those of the whole model, which has to be measured; measure, or give a budget")
    if ms is not None and not 0 < ms < float("inf"):
        raise OptionError(f"ms are the milliseconds of one forward, a positive number; got {ms!r}")


def allocate(
    plan: Plan,
    model: nn.Module,
    *,
    budget: float | None = None,
    max_error: float | None = None,
    fidelity: FidelityGoal | None = None,
    latency: Path | None = None,
    calibrate: Data | None = None,
    samples: int | None = None,
    progress: Progress | None = None,
) -> tuple[Plan, Tradeoff]:
    """Choose the architectures of the layers that ``plan`` replaces; gives the new plan, and the trade-off between costs and errors.

    Each layer, or all its parts of one size, gets one of ``named_candidates`` or stays dense. One goal decides:

    - ``budget``: the share of the dense layers' weights (without biases) to keep. The sum of the squared errors is minimal within it.
    - ``max_error``: the largest predicted relative error. The number of weights is minimal within it.
    - ``fidelity``: the cosine to reach. The number of weights is minimal as far as a search that converts and measures can tell.

    ``latency`` is a file for ``read_latency_table``. Then the table has the candidates, and milliseconds count in place of weights.
    Errors are those of plain projections. With ``calibrate`` they are output errors of calibrated projections, weighted by
    ``calibration.sensitivities``. The samples are then split in three: to fit to, to choose by, and to report errors on, because errors
    look too small on the samples of the choice. ``apply`` holds out the last part too. The model is only read.

    Cost: every candidate of every layer is projected, about nine projections for each one that ``apply`` makes. A ``fidelity`` takes up to
    seven conversions more.

    Raises:
        OptionError: options that are out of range or contradict each other, or a goal that no choice meets.
        PlanError: the plan does not fit the model, or every layer would stay dense.
        DataError: fewer than three samples, or as ``apply`` and ``read_latency_table`` do.
        ProjectionError, SurgeryError: as ``apply`` does.
    """
    check_budget(budget, max_error, latency, fidelity=None if fidelity is None else fidelity.target)
    times = None if latency is None else read_latency_table(latency, plan.replaced)
    allocation = prepare(
        plan, model, budget=budget, needs_data=fidelity is not None, times=times, calibrate=calibrate, samples=samples, progress=progress
    )
    return decide(allocation, model, budget=budget, max_error=max_error, fidelity=fidelity, progress=progress)


def prepare(
    plan: Plan,
    model: nn.Module,
    *,
    budget: float | None = None,
    needs_data: bool = False,
    times: Sequence[TimedGroup] | None = None,
    calibrate: Data | None = None,
    samples: int | None = None,
    progress: Progress | None = None,
) -> Allocation:
    """Compute all that ``allocate`` chooses from. With ``times``, milliseconds of groups of layers count in place of weights.

    A ``budget`` that is too small is refused at once, before the errors are computed. Raises what ``allocate`` raises.
    """
    check_calibration(calibrate, samples=samples, fidelity=needs_data)
    dense = check_plan(plan, model)
    check_weights(dense)
    if times is not None and not any(group.faster for group in times):
        raise PlanError(f"nothing would be replaced: {_nearest(times)}")
    units = [unit for layer in plan.replaced for unit in _units(layer)] if times is None else _timed_units(plan, times)
    counted = "weights" if times is None else "ms"
    _check_reachable(units, budget, counted)
    seen = None if calibrate is None else look(plan, model, dense, calibrate, samples)
    return Allocation(plan, judge(units, dense, seen, progress), counted, seen)


def decide(
    allocation: Allocation,
    model: nn.Module,
    *,
    budget: float | None = None,
    max_error: float | None = None,
    fidelity: FidelityGoal | None = None,
    progress: Progress | None = None,
) -> tuple[Plan, Tradeoff]:
    """Choose as ``allocate`` does. Without a goal each unit gets its best choice other than dense. Raises what ``allocate`` raises."""
    unit = allocation.unit
    if fidelity is not None:
        return reach(allocation, model, fidelity, progress)
    if budget is not None:
        return allocation.chosen(within(budget * allocation.whole), f"the least predicted error within {budget:.4g} of the dense {unit}")
    if max_error is not None:
        limit = max_error**2 * allocation.reference
        return allocation.chosen(lambda options: least_cost(options, limit), f"the fewest {unit} with a predicted error of {max_error:g}")
    return allocation.chosen(least_error_but_first, "the least error of what is faster than dense, group by group")


def reach(allocation: Allocation, model: nn.Module, goal: FidelityGoal, progress: Progress | None = None) -> tuple[Plan, Tradeoff]:
    """Search the cheapest plan with which the calibrated model reaches the goal.

    Each trial applies a plan to a copy of the model, without reconstruction, and measures the fidelity on the held-out samples. The first
    trial has the cheapest choices. Then the range of costs is halved ``STEPS`` times. The model is only read.

    Raises:
        OptionError: no plan tried reaches the goal; the message has the closest.
        DataError: the dense model or a converted one gives outputs that are not finite.
    """
    assert allocation.seen is not None
    samples = allocation.seen.samples

    def see(plan: Plan) -> float:
        trial = copy.deepcopy(model)
        found = apply(plan, trial, calibrate=samples, sequential=goal.sequential, permute=goal.permute).fidelity
        assert found is not None  # there are samples
        if not math.isfinite(found.lowest_cosine):
            raise DataError("the fidelity is no number: one of the two models gives outputs that are not finite")
        if progress is not None:
            progress(len(trials.seen) + 1, STEPS + 1, "fidelity")
        return found.lowest_cosine

    trials = Trials(allocation, see, lambda cosine: cosine >= goal.target)
    cost = allocation.least if trials.meets(allocation.least) else trials.bisect(allocation.whole, allocation.least)
    if cost == allocation.whole:  # which is dense and was not tried
        share, closest = max(trials.seen, key=lambda trial: trial[1])
        closest = math.floor(1e4 * closest) / 1e4  # so that it is reached when it is asked for
        raise OptionError(
            f"no choice of architectures that was tried reaches a fidelity of {goal.target}: the closest, at a share of {share:.3f} "
            f"of the dense layers' {allocation.unit}, has {closest:.4f}; ask for at most that, or leave the model dense"
        )
    words = f"the fewest {allocation.unit} at which output and token cosine reach {goal.target}"
    return allocation.chosen(within(cost), words, Search("the lowest cosine", goal.target, tuple(trials.seen)))


def _units(layer: LayerPlan) -> list[Unit]:
    """One unit for all parts of one size."""
    units = []
    for size in dict.fromkeys(part.stop - part.start for part in layer.parts):
        parts = tuple(part for part in layer.parts if part.stop - part.start == size)
        options = [Option(DENSE, float(len(parts) * size * layer.in_features), (None,))]
        for name, architecture in named_candidates(size, layer.in_features).items():
            options.append(Option(name, float(len(parts) * architecture.num_parameters), (architecture,)))
        units.append(Unit(((layer, parts),), tuple(options)))
    return units


def _timed_units(plan: Plan, times: Sequence[TimedGroup]) -> list[Unit]:
    """One unit for each group, with those of its choices that are faster than dense."""
    layers = {layer.fqn: layer for layer in plan.replaced}
    units = []
    for group in times:
        options = tuple(Option(each.name, each.ms, each.architectures) for each in (group.dense, *group.faster))
        reason = Reason("slower", _nearest([group])) if len(options) == 1 else None
        units.append(Unit(tuple((layers[fqn], layers[fqn].parts) for fqn in group.fqns), options, reason))
    return units


def _nearest(times: Sequence[TimedGroup]) -> str:
    """How near the fastest choice of all groups comes to dense."""
    pairs = [(group, choice) for group in times for choice in group.choices[1:]]
    if not pairs:
        return "there is no choice but dense"
    group, choice = min(pairs, key=lambda pair: pair[1].ms / pair[0].dense.ms)
    where = f" for {' and '.join(group.fqns)}" if len(times) > 1 else ""
    margin = f"{choice.ms / group.dense.ms - 1:+.1%}, and less than {-group.noise:.1%} would count as faster"
    nearest = f"{choice.ms:.3g} ms beside {group.dense.ms:.3g} ms ({margin})"
    return f"nothing is faster than dense here; {choice.name} comes nearest{where}, {nearest}"


def _check_reachable(units: Sequence[Unit], budget: float | None, counted: str) -> None:
    whole = sum(unit.options[0].cost for unit in units)
    least = sum(min(option.cost for option in unit.options) for unit in units)
    if budget is not None and least > budget * whole:
        raise OptionError(
            f"no choice of architectures keeps to a budget of {budget:g}: the smallest reachable share of the dense layers' {counted} "
            f"is {least / whole:.4f}; give at least that"
        )
