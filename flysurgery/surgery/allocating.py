"""Share a budget among the layers of a plan: each gets the architecture that suits all of them together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import sqrt
from pathlib import Path

import torch
from torch import Tensor, nn

from flysurgery.calibration import Data, collect, samples_of, sensitivities
from flysurgery.errors import OptionError, PlanError, ProjectionError
from flysurgery.factors import factors_to_dense
from flysurgery.patterns import Architecture
from flysurgery.projection import Metric, Moments, metric_of, output_error, project, project_calibrated
from flysurgery.surgery.build import Dense
from flysurgery.surgery.candidates import named_candidates
from flysurgery.surgery.check import check_plan, check_weights
from flysurgery.surgery.lagrangian import Choice, Picks, cost_of, error_of, hull_points, least_cost, least_error
from flysurgery.surgery.latency_table import Times, read_latency_table
from flysurgery.surgery.layer_plan import LayerPlan, Part, Reason
from flysurgery.surgery.plan import Plan
from flysurgery.surgery.projecting import Progress
from flysurgery.surgery.tradeoff import Point, Tradeoff
from flysurgery.surgery.workers import workers

CURVE_POINTS = 12
DENSE = "dense"
PLACEHOLDER = "lowrank"
"""The family to plan with before an allocation: it fits matrices of any sizes."""


@dataclass(frozen=True)
class _Unit:
    """Parts of one layer that get the same architecture, and what they may get, by name; None is dense."""

    layer: LayerPlan
    parts: tuple[Part, ...]
    options: Mapping[str, Architecture | None]
    costs: Mapping[str, float]


def check_budget(budget: float | None, max_error: float | None, latency: Path | None) -> None:
    """Raises OptionError unless exactly one of ``budget`` and ``max_error`` is given, and lies in its range."""
    if budget is not None and max_error is not None:
        raise OptionError("a budget bounds the costs and max-error the error, and the other is made least; give one of them")
    if budget is None and max_error is None:
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
    calibrate: Data | None = None,
    samples: int | None = None,
    progress: Progress | None = None,
) -> tuple[Plan, Tradeoff]:
    """``plan`` with the architectures of its replaced layers chosen anew, and the trade-off that they were chosen from.

    Each layer, or all its parts of one size, gets one of ``named_candidates`` or stays dense. Under a ``budget``, a share of the layers'
    weights without biases, the sum of their squared errors is made least; under ``max_error``, the sum of their weights. With
    ``latency``, a table as ``read_latency_table`` reads it, the candidates are those of the table, and milliseconds take the weights'
    place. Errors are those of plain projections; with ``calibrate``, output errors of calibrated ones on held-out samples, weighted by
    ``calibration.sensitivities``. The model is only read.

    Cost: every candidate of every layer is projected, and with ``calibrate`` calibrated. That is some ten times what ``apply`` does.

    Raises:
        OptionError: options that are out of range or contradict each other, or a budget that no choice keeps to.
        PlanError: the plan does not fit the model, or every layer would stay dense.
        ProjectionError, SurgeryError, DataError: as ``apply`` and ``read_latency_table`` do.
    """
    check_budget(budget, max_error, latency)
    if calibrate is None and samples is not None:
        raise OptionError("samples is an option of calibration; give data to calibrate with")
    dense = check_plan(plan, model)
    check_weights(dense)
    times = None if latency is None else read_latency_table(latency, plan.replaced)
    units = [unit for layer in plan.replaced for unit in _units(layer, times)]
    whole = sum(unit.costs[DENSE] for unit in units)
    _check_reachable(units, budget, whole, "ms" if times else "weights")
    judge = _Judge(plan.replaced, model, dense, calibrate, samples)
    choices, references = _judged(units, judge, progress)
    reference = sum(references)
    limit = budget * whole if budget is not None else max_error**2 * reference if max_error is not None else 0.0
    picks = least_error(choices, limit) if budget is not None else least_cost(choices, limit)
    assert picks is not None  # the cheapest was seen to fit, and dense has no error

    def point(multiplier: float | None, at: Picks) -> Point:
        cost = cost_of(choices, at)
        return Point(multiplier, cost, cost / whole, sqrt(max(error_of(choices, at), 0.0) / reference) if reference else 0.0)

    curve = [point(None if slope == float("inf") else slope, at) for slope, at in hull_points(choices)]
    tradeoff = Tradeoff("ms" if times else "weights", calibrate is not None, point(None, picks), _spread(curve))
    chosen = [(unit, unit.options[found[pick].name]) for unit, found, pick in zip(units, choices, picks, strict=True)]
    return _with_choice(plan, chosen, tradeoff), tradeoff


def _units(layer: LayerPlan, times: Times | None) -> list[_Unit]:
    if times is None:
        sizes = dict.fromkeys(part.stop - part.start for part in layer.parts)
        units = []
        for size in sizes:
            parts = tuple(part for part in layer.parts if part.stop - part.start == size)
            options = {DENSE: None, **named_candidates(size, layer.in_features)}
            dense_weights = size * layer.in_features
            costs = {n: float(len(parts) * (a.num_parameters if a else dense_weights)) for n, a in options.items()}
            units.append(_Unit(layer, parts, options, costs))
        return units
    known = {architecture: name for part in layer.parts for name, architecture in named_candidates(*_size(part, layer)).items()}
    options, costs = {}, {}
    for architecture, ms in times[layer.fqn].items():
        name = DENSE if architecture is None else known.get(architecture, str(architecture))
        options[name], costs[name] = architecture, ms
    return [_Unit(layer, layer.parts, options, costs)]


def _size(part: Part, layer: LayerPlan) -> tuple[int, int]:
    return part.stop - part.start, layer.in_features


def _check_reachable(units: Sequence[_Unit], budget: float | None, whole: float, unit: str) -> None:
    least = sum(min(each.costs.values()) for each in units)
    if budget is not None and least > budget * whole:
        raise OptionError(
            f"no choice of architectures keeps to a budget of {budget:g}: the smallest reachable share of the dense layers' {unit} "
            f"is {least / whole:.4f}; give at least that"
        )


class _Judge:
    """What an architecture costs a part in accuracy: the squared error, and the square that it is relative to."""

    def __init__(
        self, layers: Sequence[LayerPlan], model: nn.Module, dense: Mapping[str, Dense], calibrate: Data | None, samples: int | None
    ) -> None:
        self._dense = dense
        self._metrics: dict[str, Metric] = {}
        self._held_out: dict[str, Moments] = {}
        self._weights: dict[str, float] = {}
        if calibrate is not None:
            taken = samples_of(calibrate, count=samples)
            calls = {layer.fqn: layer.calls for layer in layers}
            felt = sensitivities(model, list(calls), taken.fit())
            fit, self._held_out = collect(model, calls, taken.fit()), collect(model, calls, taken.held_out())
            for layer in layers:
                self._metrics[layer.fqn] = metric_of(fit[layer.fqn], bias=dense[layer.fqn].bias is not None)
                self._weights[layer.fqn] = felt[layer.fqn] * layer.rows

    @torch.no_grad()
    def errors(self, unit: _Unit) -> tuple[dict[str, float], float]:
        """The errors by option, and the square that they are relative to."""
        fqn = unit.layer.fqn
        sums = dict.fromkeys(unit.options, 0.0)
        reference = 0.0
        for part in unit.parts:
            weight = self._dense[fqn].weight.detach()[part.start : part.stop].flatten(1)
            matrix = weight.cpu().to(torch.float64)
            values = torch.linalg.svdvals(matrix).square() if fqn not in self._metrics else None
            for name, architecture in unit.options.items():
                try:
                    if values is not None:
                        sums[name] += _plain(weight, values, architecture)
                    else:
                        sums[name] += self._calibrated(fqn, weight, architecture)
                except ProjectionError as error:
                    raise ProjectionError(f"layer {fqn}: {error}") from error
            reference += float(values.sum()) if values is not None else self._weights[fqn] * self._reference(fqn, matrix)
        return sums, reference

    def _calibrated(self, fqn: str, weight: Tensor, architecture: Architecture | None) -> float:
        if architecture is None:
            return 0.0
        found = project_calibrated(weight, architecture, self._metrics[fqn])
        moments = self._held_out[fqn]
        device = moments.mean.device
        product = factors_to_dense([factor.detach().to(device, torch.float64) for factor in found.projection.factors])
        shift = None if found.shift is None else found.shift.to(device)
        return self._weights[fqn] * output_error(weight.to(device, torch.float64), product, shift, moments).squared

    def _reference(self, fqn: str, matrix: Tensor) -> float:
        moments = self._held_out[fqn]
        matrix = matrix.to(moments.mean.device)
        return output_error(matrix, matrix, None, moments).reference


def _plain(weight: Tensor, values: Tensor, architecture: Architecture | None) -> float:
    """The squared error of a plain projection; that of low rank is in the squared singular ``values`` already."""
    if architecture is None:
        return 0.0
    if len(architecture) == 2 and all(pattern.a == pattern.d == 1 for pattern in architecture):
        return float(values[architecture.inner_features[0] :].sum())
    return project(weight, architecture).relative_error ** 2 * float(values.sum())


def _judged(units: Sequence[_Unit], judge: _Judge, progress: Progress | None) -> tuple[list[list[Choice]], list[float]]:
    """The choices of each unit and its reference."""
    choices, references = [], []
    with workers() as pool:
        jobs = [pool.submit(judge.errors, unit) for unit in units]
        for done, (unit, job) in enumerate(zip(units, jobs, strict=True), start=1):
            errors, reference = job.result()
            choices.append([Choice(name, unit.costs[name], errors[name]) for name in unit.options])
            references.append(reference)
            if progress is not None:
                progress(done, len(units), unit.layer.fqn)
    return choices, references


def _spread(curve: Sequence[Point]) -> tuple[Point, ...]:
    """A dozen points of the curve, its ends among them, at even distances of cost."""
    low, high = curve[0].cost, curve[-1].cost
    wanted = [low + (high - low) * step / (CURVE_POINTS - 1) for step in range(CURVE_POINTS)]
    return tuple(dict.fromkeys(min(curve, key=lambda point: abs(point.cost - cost)) for cost in wanted))


def _with_choice(plan: Plan, chosen: Sequence[tuple[_Unit, Architecture | None]], tradeoff: Tradeoff) -> Plan:
    parts: dict[str, list[Part]] = {}
    for unit, architecture in chosen:
        parts.setdefault(unit.layer.fqn, []).extend(replace(part, architecture=architecture) for part in unit.parts)
    text = f"the budget is best kept with this layer dense, at a share of {tradeoff.chosen.share:.3f} of the {tradeoff.unit} in all"
    kept = Reason("budget", text)
    layers = []
    for layer in plan.layers:
        found = sorted(parts.get(layer.fqn, ()), key=lambda part: part.start)
        if found and any(part.architecture for part in found):
            layer = replace(layer, parts=tuple(found))
        elif found:
            layer = replace(layer, status="keep", reason=kept, parts=())
        layers.append(layer)
    new = replace(plan, layers=tuple(layers))
    if not new.replaced:
        raise PlanError("nothing would be replaced: every layer does best dense; give a smaller budget, or a larger max-error")
    names = [name for layer in new.replaced for name in layer.names]
    needed = [switch for switch in plan.switches if any(name.startswith(f"{switch.module_fqn}.") for name in names)]
    return replace(new, switches=tuple(needed))
