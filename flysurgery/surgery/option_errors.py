"""What each architecture that a layer may get costs in accuracy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import Tensor, nn

from flysurgery.calibration import Data, collect, samples_of, sensitivities, watched
from flysurgery.errors import DataError
from flysurgery.fidelity import Progress
from flysurgery.patterns import Architecture, family_of
from flysurgery.projection import (
    FitProblem,
    Fitted,
    Metric,
    Moments,
    OutputError,
    fit_side_by_side,
    metric_of,
    output_error,
    product_of,
    project,
    workers,
)
from flysurgery.reason import Reason
from flysurgery.surgery.change import Dense, changing, matrix_of, prepare
from flysurgery.surgery.plan import LayerPlan, Part, Plan
from flysurgery.surgery.projecting import NO_ERROR, naming

LEAST_SAMPLES = 3


@dataclass(frozen=True)
class Option:
    """What a unit may get: an architecture for the parts of each of its layers, None for dense; what that costs, and what it loses."""

    name: str
    cost: float
    architectures: tuple[Architecture | None, ...]
    loss: OutputError = NO_ERROR

    @property
    def error(self) -> float:
        """The squared error."""
        return self.loss.squared


@dataclass(frozen=True)
class Unit:
    """Parts of layers for which one choice is made. The first option is dense; ``dense_reason`` says why it is taken where it is."""

    members: tuple[tuple[LayerPlan, tuple[Part, ...]], ...]
    options: tuple[Option, ...]
    dense_reason: Reason | None = None


@dataclass(frozen=True)
class Seen:
    """What calibration data show of the layers, by name: the metric to fit in, the moments of ``judged_on`` other samples to choose by,
    and the weight of an error."""

    judged_on: int
    metrics: Mapping[str, Metric]
    moments: Mapping[str, Moments]
    weights: Mapping[str, float]


@dataclass(frozen=True, eq=False)
class _Matrix:
    """One part of a layer with the architectures that it gets by the options of its unit, which has this number."""

    unit: int
    fqn: str
    weight: Tensor  # shape: (out_features, in_features)
    architectures: tuple[Architecture | None, ...]


_Found: TypeAlias = Iterator[tuple[_Matrix, int, OutputError]]
"""A matrix, the number of an option, and its error."""


def look(plan: Plan, model: nn.Module, dense: Mapping[str, Dense], calibrate: Data, count: int | None) -> Seen:
    """Run the model over the samples. Those that ``apply`` holds out are left out, so that it measures on samples without a part here.

    Raises:
        DataError: fewer than three samples.
    """
    whole = samples_of(calibrate, count=count)
    if len(whole) < LEAST_SAMPLES:
        raise DataError(
            f"{whole.name}: a choice needs at least {LEAST_SAMPLES} samples, to fit to, to choose by and to report on; "
            f"there are {len(whole)}"
        )
    taken = whole.without_held_out()
    calls = {layer.fqn: layer.calls for layer in plan.replaced}
    with changing(model, keep=False):
        prepare(model, plan)
        with watched(model, calls) as fit:
            felt = sensitivities(model, list(calls), taken.fit())
        moments = collect(model, calls, taken.held_out())
    return Seen(
        judged_on=taken.held_out_count,
        metrics={fqn: metric_of(fit[fqn], bias=dense[fqn].bias is not None) for fqn in calls},
        moments=moments,
        weights={layer.fqn: felt[layer.fqn] * layer.rows for layer in plan.replaced},
    )


def judge(units: Sequence[Unit], dense: Mapping[str, Dense], seen: Seen | None, progress: Progress | None) -> list[Unit]:
    """Compute the errors of all options: those of calibrated projections where calibration data were ``seen``, else of plain ones."""
    matrices = [
        _Matrix(number, layer.fqn, matrix_of(dense[layer.fqn], part), tuple(option.architectures[index] for option in unit.options))
        for number, unit in enumerate(units)
        for index, (layer, parts) in enumerate(unit.members)
        for part in parts
    ]
    options = [list(unit.options) for unit in units]
    total = sum(len(matrix.architectures) for matrix in matrices)
    found = _plain(matrices) if seen is None else _calibrated(matrices, seen)
    for done, (matrix, index, loss) in enumerate(found, start=1):
        option = options[matrix.unit][index]
        options[matrix.unit][index] = replace(option, loss=option.loss + loss)
        if progress is not None:
            progress(done, total, matrix.fqn)
    return [replace(unit, options=tuple(of_unit)) for unit, of_unit in zip(units, options, strict=True)]


def _plain(matrices: Sequence[_Matrix]) -> _Found:
    with workers() as pool:
        for matrix, errors in zip(matrices, pool.map(_plain_errors, matrices), strict=True):
            for index, error in enumerate(errors):
                yield matrix, index, error


@torch.no_grad()
def _plain_errors(matrix: _Matrix) -> list[OutputError]:
    """Errors of one matrix, one for each option. The squared singular values give those of low rank."""
    weight = matrix.weight.cpu().to(torch.float64)
    values = torch.linalg.svdvals(weight).square()
    errors = []
    for architecture in matrix.architectures:
        if architecture is None:
            squared = 0.0
        elif family_of(architecture) == "low rank":
            squared = float(values[architecture.inner_features[0] :].sum())
        else:
            with naming(matrix.fqn):
                squared = float((weight - product_of(project(matrix.weight, architecture))).square().sum())
        errors.append(OutputError(squared, float(values.sum())))
    return errors


def _calibrated(matrices: Sequence[_Matrix], seen: Seen) -> _Found:
    options = [(matrix, index, each) for matrix in matrices for index, each in enumerate(matrix.architectures)]
    fitted = [(matrix, index, architecture) for matrix, index, architecture in options if architecture is not None]
    references: dict[_Matrix, float] = {}
    for matrix in matrices:
        moments = seen.moments[matrix.fqn]
        references[matrix] = moments.mean_square(matrix.weight.to(moments.mean))

    def weighted(matrix: _Matrix, squared: float) -> OutputError:
        scale = seen.weights[matrix.fqn]
        return OutputError(scale * squared, scale * references[matrix])

    @torch.no_grad()
    def finish(number: int, found: Fitted | None) -> OutputError:
        matrix, _, architecture = fitted[number]
        metric = seen.metrics[matrix.fqn]
        weight = matrix.weight.to(metric.gram)
        with naming(matrix.fqn):
            product = product_of(project(matrix.weight, architecture)).to(weight) if found is None else found.product
        shift = None if metric.mean is None else (weight - product) @ metric.mean
        return weighted(matrix, output_error(weight, product, shift, seen.moments[matrix.fqn], references[matrix]).squared)

    for matrix, index, architecture in options:
        if architecture is None:
            yield matrix, index, weighted(matrix, 0.0)
    problems = [FitProblem(matrix.weight, architecture, seen.metrics[matrix.fqn].gram) for matrix, _, architecture in fitted]
    for number, loss in fit_side_by_side(problems, finish):
        matrix, index, _ = fitted[number]
        yield matrix, index, loss
