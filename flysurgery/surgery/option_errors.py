"""What each architecture that a layer may get costs in accuracy."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import Tensor, nn

from flysurgery.calibration import Data, collect, samples_of, sensitivities, watched
from flysurgery.errors import DataError, Reason
from flysurgery.fidelity import Progress
from flysurgery.patterns import Architecture, family_of
from flysurgery.projection import FitProblem, Fitted, Metric, Moments, fit_side_by_side, metric_of, product_of, project, workers
from flysurgery.surgery.plan import LayerPlan, Part, Plan
from flysurgery.surgery.projecting import naming
from flysurgery.surgery.transaction import Dense, changing, matrix_of, prepare

LEAST_SAMPLES = 3


@dataclass(frozen=True)
class Option:
    """What a unit may get: an architecture for the parts of each of its layers, None for dense; its cost, and its squared error."""

    name: str
    cost: float
    architectures: tuple[Architecture | None, ...]
    error: float = 0.0


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


@dataclass(frozen=True)
class _Matrix:
    """One part of a layer with the architectures that it gets by the options of its unit other than dense."""

    unit: int
    fqn: str
    weight: Tensor  # shape: (out_features, in_features)
    architectures: tuple[Architecture, ...]


_Found: TypeAlias = Iterator[tuple[_Matrix, int, float]]
"""A matrix, the number of one of its architectures, and the squared error of that."""


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


def judge(units: Sequence[Unit], dense: Mapping[str, Dense], seen: Seen | None, progress: Progress | None) -> tuple[list[Unit], float]:
    """The units with the errors of all options, and what squared errors are relative to: the sum of the squares of what is right.

    Errors are those of calibrated projections where calibration data were ``seen``, else of plain ones.
    """
    matrices = []
    for number, unit in enumerate(units):
        for index, (layer, parts) in enumerate(unit.members):
            architectures = tuple(each for option in unit.options[1:] if (each := option.architectures[index]) is not None)
            matrices += [_Matrix(number, layer.fqn, matrix_of(dense[layer.fqn], part), architectures) for part in parts]
    errors = [[0.0] * len(unit.options) for unit in units]
    total = sum(len(matrix.architectures) for matrix in matrices)
    for done, (matrix, index, error) in enumerate(_plain(matrices) if seen is None else _calibrated(matrices, seen), start=1):
        errors[matrix.unit][1 + index] += error
        if progress is not None:
            progress(done, total, matrix.fqn)
    judged = []
    for unit, of_unit in zip(units, errors, strict=True):
        options = tuple(replace(option, error=error) for option, error in zip(unit.options, of_unit, strict=True))
        judged.append(replace(unit, options=options))
    return judged, sum(_square(matrix, seen) for matrix in matrices)


def _square(matrix: _Matrix, seen: Seen | None) -> float:
    if seen is None:
        return float(torch.linalg.vector_norm(matrix.weight.cpu(), dtype=torch.float64)) ** 2
    moments = seen.moments[matrix.fqn]
    return seen.weights[matrix.fqn] * moments.mean_square(matrix.weight.to(moments.mean))


def _plain(matrices: Sequence[_Matrix]) -> _Found:
    with workers() as pool:
        for matrix, errors in zip(matrices, pool.map(_plain_errors, matrices), strict=True):
            for index, error in enumerate(errors):
                yield matrix, index, error


@torch.no_grad()
def _plain_errors(matrix: _Matrix) -> list[float]:
    """Errors of one matrix, one for each architecture. The squared singular values give those of low rank."""
    weight = matrix.weight.cpu().to(torch.float64)
    values = torch.linalg.svdvals(weight).square()
    errors = []
    for architecture in matrix.architectures:
        if family_of(architecture) == "low rank":
            errors.append(float(values[architecture.inner_features[0] :].sum()))
        else:
            with naming(matrix.fqn):
                errors.append(float((weight - product_of(project(matrix.weight, architecture))).square().sum()))
    return errors


def _calibrated(matrices: Sequence[_Matrix], seen: Seen) -> _Found:
    fitted = [(matrix, index, each) for matrix in matrices for index, each in enumerate(matrix.architectures)]

    @torch.no_grad()
    def finish(number: int, found: Fitted | None) -> float:
        matrix, _, architecture = fitted[number]
        metric, moments = seen.metrics[matrix.fqn], seen.moments[matrix.fqn]
        with naming(matrix.fqn):
            product = product_of(project(matrix.weight, architecture)) if found is None else found.product
        lost = matrix.weight.to(moments.mean) - product.to(moments.mean)
        return seen.weights[matrix.fqn] * moments.mean_square(lost, None if metric.mean is None else -(lost @ metric.mean))

    problems = [FitProblem(matrix.weight, architecture, seen.metrics[matrix.fqn].gram) for matrix, _, architecture in fitted]
    for number, error in fit_side_by_side(problems, finish):
        matrix, index, _ = fitted[number]
        yield matrix, index, error
