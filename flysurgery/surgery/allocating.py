"""Share a budget among the layers of a plan: each gets the architecture that suits all of them together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from torch import nn

from flysurgery.calibration import Data
from flysurgery.errors import OptionError, PlanError
from flysurgery.patterns import Architecture
from flysurgery.projection import OutputError
from flysurgery.surgery.candidates import named_candidates
from flysurgery.surgery.check import check_plan, check_weights
from flysurgery.surgery.judging import DENSE, Errors, Judge, Unit
from flysurgery.surgery.lagrangian import Choice, Picks, cost_of, hull_points, least_cost, least_error, least_error_but_first
from flysurgery.surgery.latency_table import read_latency_table, timed_layers
from flysurgery.surgery.layer_plan import LayerPlan, Part, Reason
from flysurgery.surgery.plan import Plan
from flysurgery.surgery.projecting import Progress
from flysurgery.surgery.timed import TimedGroup
from flysurgery.surgery.tradeoff import Point, Tradeoff

CURVE_POINTS = 12
PLACEHOLDER = "lowrank"
"""The family to plan with before an allocation: it fits matrices of any sizes."""


def check_budget(budget: float | None, max_error: float | None, latency: Path | None, *, measured: bool = False) -> None:
    """Raises OptionError unless exactly one of ``budget`` and ``max_error`` is given, and lies in its range.

    Where times are ``measured`` both may lack, and there is no table of them.
    """
    if budget is not None and max_error is not None:
        raise OptionError("a budget bounds the costs and max-error the error, and the other is made least; give one of them")
    if measured and latency is not None:
        raise OptionError("a latency table has the times that measuring would find; give one of the two")
    if budget is None and max_error is None and not measured:
        if latency is not None:
            raise OptionError("a latency table needs a budget, the share of the dense milliseconds, or max-error; give one of them")
        raise OptionError("an allocation needs a budget or max-error; give one of them")
    if budget is not None and not 0 < budget <= 1:
        raise OptionError(f"budget is the share of the dense layers' costs to keep, above 0 and at most 1; got {budget!r}")
    if max_error is not None and not 0 < max_error < 1:
        raise OptionError(f"max-error is a relative error, above 0 and below 1; got {max_error!r}")


def allocate(
    plan: Plan,
    model: nn.Module,
    *,
    budget: float | None = None,
    max_error: float | None = None,
    latency: Path | None = None,
    times: Sequence[TimedGroup] | None = None,
    calibrate: Data | None = None,
    samples: int | None = None,
    progress: Progress | None = None,
) -> tuple[Plan, Tradeoff]:
    """``plan`` with the architectures of its replaced layers chosen anew, and the trade-off that they were chosen from.

    Each layer, or all its parts of one size, gets one of ``named_candidates`` or stays dense. Under a ``budget``, a share of the layers'
    weights without biases, the sum of their squared errors is made least; under ``max_error``, the sum of their weights. With
    ``latency``, a table as ``read_latency_table`` reads it, the candidates are those of the table, and milliseconds take the weights'
    place. So they do with ``times``, measured ones of groups of layers that are chosen for together; without a bound each group then
    gets the choice of least error among those that are faster than dense by more than the noise. Errors are those of plain
    projections; with ``calibrate``, output errors of calibrated ones, weighted by ``calibration.sensitivities``. A choice by errors makes
    them look smaller than they are, so the samples are split in three: some are fitted to, some chosen by, and on the rest, which
    ``apply`` holds out too, the errors are reported besides. The model is only read.

    Cost: every candidate of every layer is projected, and with ``calibrate`` calibrated, side by side. These are some nine fits for
    each that ``apply`` makes.

    Raises:
        OptionError: options that are out of range or contradict each other, or a budget that no choice keeps to.
        PlanError: the plan does not fit the model, or every layer would stay dense.
        DataError: fewer than three samples, or as ``apply`` and ``read_latency_table`` do.
        ProjectionError, SurgeryError: as ``apply`` does.
    """
    check_budget(budget, max_error, latency, measured=times is not None)
    if calibrate is None and samples is not None:
        raise OptionError("samples is an option of calibration; give data to calibrate with")
    dense = check_plan(plan, model)
    check_weights(dense)
    if latency is not None:
        times = timed_layers(read_latency_table(latency, plan.replaced), plan.replaced)
    if times is not None and not any(group.faster for group in times):
        raise PlanError(f"nothing would be replaced: {_nearest(times)}")
    units = [unit for layer in plan.replaced for unit in _units(layer)] if times is None else _timed_units(plan, times)
    whole = sum(unit.costs[DENSE] for unit in units)
    _check_reachable(units, budget, whole, "ms" if times else "weights")
    judge = Judge(plan.replaced, model, dense, calibrate, samples)
    judged = _judged(units, judge, progress)
    choices = [
        [Choice(name, unit.costs[name], each[name][0].squared) for name in unit.options] for unit, each in zip(units, judged, strict=True)
    ]
    reference = sum(each[DENSE][0].reference for each in judged)
    limit = budget * whole if budget is not None else max_error**2 * reference if max_error is not None else 0.0
    if budget is not None:
        picks = least_error(choices, limit)
    elif max_error is not None:
        picks = least_cost(choices, limit)
    else:
        picks = least_error_but_first(choices)
    assert picks is not None  # the cheapest was seen to fit, and dense has no error

    def point(multiplier: float | None, at: Picks) -> Point:
        cost = cost_of(choices, at)
        errors = [each[found[pick].name] for each, found, pick in zip(judged, choices, at, strict=True)]
        chosen_by, held_out = (sum(of_part, OutputError(0.0, 0.0)).relative for of_part in zip(*errors, strict=True))
        return Point(multiplier, cost, cost / whole, chosen_by, None if judge.split is None else held_out)

    curve = [point(None if slope == float("inf") else slope, at) for slope, at in hull_points(choices)]
    tradeoff = Tradeoff("ms" if times else "weights", calibrate is not None, point(None, picks), _spread(curve), judge.split)
    chosen = [(unit, found[pick].name) for unit, found, pick in zip(units, choices, picks, strict=True)]
    return _with_choice(plan, chosen, tradeoff), tradeoff


def _units(layer: LayerPlan) -> list[Unit]:
    sizes = dict.fromkeys(part.stop - part.start for part in layer.parts)
    units = []
    for size in sizes:
        parts = tuple(part for part in layer.parts if part.stop - part.start == size)
        options: dict[str, Architecture | None] = {DENSE: None, **named_candidates(size, layer.in_features)}
        dense_weights = size * layer.in_features
        costs = {n: float(len(parts) * (a.num_parameters if a else dense_weights)) for n, a in options.items()}
        units.append(Unit(((layer, parts),), {name: (each,) for name, each in options.items()}, costs))
    return units


def _timed_units(plan: Plan, times: Sequence[TimedGroup]) -> list[Unit]:
    """One unit for each group, with those of its choices that are faster than dense."""
    layers = {layer.fqn: layer for layer in plan.replaced}
    units = []
    for group in times:
        choices = (group.dense, *group.faster)
        reason = Reason("slower", _nearest([group])) if len(choices) == 1 else None
        members = tuple((layers[fqn], layers[fqn].parts) for fqn in group.fqns)
        units.append(Unit(members, {each.name: each.architectures for each in choices}, {each.name: each.ms for each in choices}, reason))
    return units


def _nearest(times: Sequence[TimedGroup]) -> str:
    """How near the fastest choice of all groups comes to dense."""
    pairs = [(group, choice) for group in times for choice in group.choices[1:]]
    if not pairs:
        return "there is no choice but dense"
    group, choice = min(pairs, key=lambda pair: pair[1].ms / pair[0].dense.ms)
    where = f" for {' and '.join(group.fqns)}" if len(times) > 1 else ""
    return f"nothing is faster than dense here; {choice.name} comes nearest{where}, {choice.ms:.3g} ms beside {group.dense.ms:.3g} ms"


def _check_reachable(units: Sequence[Unit], budget: float | None, whole: float, unit: str) -> None:
    least = sum(min(each.costs.values()) for each in units)
    if budget is not None and least > budget * whole:
        raise OptionError(
            f"no choice of architectures keeps to a budget of {budget:g}: the smallest reachable share of the dense layers' {unit} "
            f"is {least / whole:.4f}; give at least that"
        )


def _judged(units: Sequence[Unit], judge: Judge, progress: Progress | None) -> list[Errors]:
    """The errors of each unit."""
    judged: dict[int, Errors] = {}
    for number, errors in judge.errors(units):
        judged[number] = errors
        if progress is not None:
            progress(len(judged), len(units), units[number].members[-1][0].fqn)
    return [judged[number] for number in range(len(units))]


def _spread(curve: Sequence[Point]) -> tuple[Point, ...]:
    """A dozen points of the curve, its ends among them, at even distances of cost."""
    low, high = curve[0].cost, curve[-1].cost
    wanted = [low + (high - low) * step / (CURVE_POINTS - 1) for step in range(CURVE_POINTS)]
    return tuple(dict.fromkeys(min(curve, key=lambda point: abs(point.cost - cost)) for cost in wanted))


def _with_choice(plan: Plan, chosen: Sequence[tuple[Unit, str]], tradeoff: Tradeoff) -> Plan:
    text = f"the budget is best kept with this layer dense, at a share of {tradeoff.chosen.share:.3f} of the {tradeoff.unit} in all"
    parts: dict[str, list[Part]] = {}
    reasons: dict[str, Reason] = {}
    for unit, name in chosen:
        for (layer, of), architecture in zip(unit.members, unit.options[name], strict=True):
            parts.setdefault(layer.fqn, []).extend(replace(part, architecture=architecture) for part in of)
            reasons[layer.fqn] = unit.dense_reason or Reason("budget", text)
    replaced = {
        fqn: tuple(sorted(found, key=lambda part: part.start)) for fqn, found in parts.items() if any(p.architecture for p in found)
    }
    layers = tuple(replace(layer, parts=replaced[layer.fqn]) if layer.fqn in replaced else layer for layer in plan.layers)
    new = replace(plan, layers=layers).keeping({fqn: reason for fqn, reason in reasons.items() if fqn not in replaced})
    if new.replaced:
        return new
    raise PlanError("nothing would be replaced: every layer does best dense; give a smaller budget, or a larger max-error")
