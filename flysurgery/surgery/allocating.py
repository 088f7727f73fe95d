"""Share a budget among the layers of a plan: each gets the architecture that suits all of them together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor, nn

from flysurgery.calibration import Data, collect, samples_of, sensitivities
from flysurgery.errors import DataError, OptionError, PlanError, ProjectionError
from flysurgery.factors import factors_to_dense
from flysurgery.patterns import Architecture
from flysurgery.projection import Metric, Moments, OutputError, metric_of, output_error, project, project_calibrated, workers
from flysurgery.surgery.build import Dense
from flysurgery.surgery.candidates import named_candidates
from flysurgery.surgery.check import check_plan, check_weights
from flysurgery.surgery.lagrangian import Choice, Picks, cost_of, hull_points, least_cost, least_error, least_error_but_first
from flysurgery.surgery.latency_table import read_latency_table, timed_layers
from flysurgery.surgery.layer_plan import LayerPlan, Part, Reason
from flysurgery.surgery.plan import Plan
from flysurgery.surgery.projecting import Progress
from flysurgery.surgery.timed import TimedGroup
from flysurgery.surgery.tradeoff import Point, Split, Tradeoff

CURVE_POINTS = 12
DENSE = "dense"
LEAST_SAMPLES = 3
PLACEHOLDER = "lowrank"
"""The family to plan with before an allocation: it fits matrices of any sizes."""

Options: TypeAlias = Mapping[str, Architecture | None]
Errors: TypeAlias = Mapping[str, tuple[OutputError, OutputError]]
"""By option: the error to choose by, and that on samples held out from the choice; twice the same of a plain projection."""


@dataclass(frozen=True)
class _Unit:
    """Parts of layers for which one choice is made, and what it may be, by name: an architecture for the parts of each layer.

    None is dense. ``dense_reason`` says why the layers stay dense where they do.
    """

    members: tuple[tuple[LayerPlan, tuple[Part, ...]], ...]
    options: Mapping[str, tuple[Architecture | None, ...]]
    costs: Mapping[str, float]
    dense_reason: Reason | None = None


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

    Cost: every candidate of every layer is projected, and with ``calibrate`` calibrated. That is some ten times what ``apply`` does.

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
    judge = _Judge(plan.replaced, model, dense, calibrate, samples)
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


def _units(layer: LayerPlan) -> list[_Unit]:
    sizes = dict.fromkeys(part.stop - part.start for part in layer.parts)
    units = []
    for size in sizes:
        parts = tuple(part for part in layer.parts if part.stop - part.start == size)
        options: dict[str, Architecture | None] = {DENSE: None, **named_candidates(size, layer.in_features)}
        dense_weights = size * layer.in_features
        costs = {n: float(len(parts) * (a.num_parameters if a else dense_weights)) for n, a in options.items()}
        units.append(_Unit(((layer, parts),), {name: (each,) for name, each in options.items()}, costs))
    return units


def _timed_units(plan: Plan, times: Sequence[TimedGroup]) -> list[_Unit]:
    """One unit for each group, with those of its choices that are faster than dense."""
    layers = {layer.fqn: layer for layer in plan.replaced}
    units = []
    for group in times:
        choices = (group.dense, *group.faster)
        reason = Reason("slower", _nearest([group])) if len(choices) == 1 else None
        members = tuple((layers[fqn], layers[fqn].parts) for fqn in group.fqns)
        units.append(_Unit(members, {each.name: each.architectures for each in choices}, {each.name: each.ms for each in choices}, reason))
    return units


def _nearest(times: Sequence[TimedGroup]) -> str:
    """How near the fastest choice of all groups comes to dense."""
    pairs = [(group, choice) for group in times for choice in group.choices[1:]]
    if not pairs:
        return "there is no choice but dense"
    group, choice = min(pairs, key=lambda pair: pair[1].ms / pair[0].dense.ms)
    where = f" for {' and '.join(group.fqns)}" if len(times) > 1 else ""
    return f"nothing is faster than dense here; {choice.name} comes nearest{where}, {choice.ms:.3g} ms beside {group.dense.ms:.3g} ms"


def _check_reachable(units: Sequence[_Unit], budget: float | None, whole: float, unit: str) -> None:
    least = sum(min(each.costs.values()) for each in units)
    if budget is not None and least > budget * whole:
        raise OptionError(
            f"no choice of architectures keeps to a budget of {budget:g}: the smallest reachable share of the dense layers' {unit} "
            f"is {least / whole:.4f}; give at least that"
        )


class _Judge:
    """What an architecture costs a part in accuracy; ``split`` says on how many samples, None of a plain projection."""

    def __init__(
        self, layers: Sequence[LayerPlan], model: nn.Module, dense: Mapping[str, Dense], calibrate: Data | None, samples: int | None
    ) -> None:
        self._dense = dense
        self._metrics: dict[str, Metric] = {}
        self._moments: dict[str, tuple[Moments, Moments]] = {}
        self._weights: dict[str, float] = {}
        self.split: Split | None = None
        if calibrate is not None:
            whole = samples_of(calibrate, count=samples)
            if len(whole) < LEAST_SAMPLES:
                raise DataError(
                    f"{whole.name}: a budget needs at least {LEAST_SAMPLES} samples, to fit to, to choose by and to report on; "
                    f"there are {len(whole)}"
                )
            taken = whole.without_held_out()
            self.split = Split(len(taken) - taken.held_out_count, taken.held_out_count, whole.held_out_count)
            calls = {layer.fqn: layer.calls for layer in layers}
            felt = sensitivities(model, list(calls), taken.fit())
            fit, choose, report = (collect(model, calls, part) for part in (taken.fit(), taken.held_out(), whole.held_out()))
            for layer in layers:
                self._metrics[layer.fqn] = metric_of(fit[layer.fqn], bias=dense[layer.fqn].bias is not None)
                self._moments[layer.fqn] = choose[layer.fqn], report[layer.fqn]
                self._weights[layer.fqn] = felt[layer.fqn] * layer.rows

    @torch.no_grad()
    def errors(self, unit: _Unit) -> Errors:
        """The errors of every option of the unit."""
        none = OutputError(0.0, 0.0)
        sums = dict.fromkeys(unit.options, (none, none))
        for index, (layer, parts) in enumerate(unit.members):
            for part in parts:
                weight = self._dense[layer.fqn].weight.detach()[part.start : part.stop].flatten(1)
                options = {name: architectures[index] for name, architectures in unit.options.items()}
                try:
                    found = self._calibrated(layer.fqn, weight, options) if layer.fqn in self._metrics else _plain(weight, options)
                except ProjectionError as error:
                    raise ProjectionError(f"layer {layer.fqn}: {error}") from error
                sums = {name: (total[0] + found[name][0], total[1] + found[name][1]) for name, total in sums.items()}
        return sums

    def _calibrated(self, fqn: str, weight: Tensor, options: Options) -> Errors:
        moments, scale = self._moments[fqn], self._weights[fqn]
        device = moments[0].mean.device
        matrix = weight.to(device, torch.float64)
        errors = {}
        for name, architecture in options.items():
            product, shift = matrix, None
            if architecture is not None:
                found = project_calibrated(weight, architecture, self._metrics[fqn])
                product = factors_to_dense([factor.detach().to(device, torch.float64) for factor in found.projection.factors])
                shift = None if found.shift is None else found.shift.to(device)
            by, held_out = (output_error(matrix, product, shift, each) for each in moments)
            errors[name] = tuple(OutputError(scale * each.squared, scale * each.reference) for each in (by, held_out))
        return errors


def _plain(weight: Tensor, options: Options) -> Errors:
    """Errors of plain projections; those of low rank are in the squared singular values already."""
    values = torch.linalg.svdvals(weight.cpu().to(torch.float64)).square()
    errors = {}
    for name, architecture in options.items():
        if architecture is None:
            squared = 0.0
        elif len(architecture) == 2 and all(pattern.a == pattern.d == 1 for pattern in architecture):
            squared = float(values[architecture.inner_features[0] :].sum())
        else:
            squared = project(weight, architecture).relative_error ** 2 * float(values.sum())
        errors[name] = (OutputError(squared, float(values.sum())),) * 2
    return errors


def _judged(units: Sequence[_Unit], judge: _Judge, progress: Progress | None) -> list[Errors]:
    """The errors of each unit."""
    judged = []
    with workers() as pool:
        jobs = [pool.submit(judge.errors, unit) for unit in units]
        for done, (unit, job) in enumerate(zip(units, jobs, strict=True), start=1):
            judged.append(job.result())
            if progress is not None:
                progress(done, len(units), unit.members[-1][0].fqn)
    return judged


def _spread(curve: Sequence[Point]) -> tuple[Point, ...]:
    """A dozen points of the curve, its ends among them, at even distances of cost."""
    low, high = curve[0].cost, curve[-1].cost
    wanted = [low + (high - low) * step / (CURVE_POINTS - 1) for step in range(CURVE_POINTS)]
    return tuple(dict.fromkeys(min(curve, key=lambda point: abs(point.cost - cost)) for cost in wanted))


def _with_choice(plan: Plan, chosen: Sequence[tuple[_Unit, str]], tradeoff: Tradeoff) -> Plan:
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
