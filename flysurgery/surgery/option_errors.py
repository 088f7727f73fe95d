"""What each architecture that a layer may get costs in accuracy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import Tensor, nn

from flysurgery.calibration import Data, Samples, collect, samples_of, sensitivities, watched
from flysurgery.errors import DataError
from flysurgery.patterns import Architecture, family_of
from flysurgery.projection import Fitted, Metric, Moments, OutputError, metric_of, output_error, project, workers
from flysurgery.surgery.build import Dense, matrix_of
from flysurgery.surgery.change import changing
from flysurgery.surgery.choices import Split
from flysurgery.surgery.plan import LayerPlan, Part, Plan, Reason
from flysurgery.surgery.projecting import NO_ERROR, Progress, fit_products, naming, product_of

LEAST_SAMPLES = 3


@dataclass(frozen=True)
class Option:
    """What a unit may get: an architecture for the parts of each of its layers, None for dense, and what that costs.

    ``chosen_by`` is the error to choose by, ``held_out`` that on samples held out from the choice; the same of a plain projection.
    """

    name: str
    cost: float
    architectures: tuple[Architecture | None, ...]
    chosen_by: OutputError = NO_ERROR
    held_out: OutputError = NO_ERROR

    @property
    def error(self) -> float:
        """The squared error to choose by."""
        return self.chosen_by.squared


@dataclass(frozen=True)
class Unit:
    """Parts of layers for which one choice is made. The first option is dense; ``dense_reason`` says why it is taken where it is."""

    members: tuple[tuple[LayerPlan, tuple[Part, ...]], ...]
    options: tuple[Option, ...]
    dense_reason: Reason | None = None


@dataclass(frozen=True)
class Seen:
    """What calibration data show of the layers, by name: the metric to fit in, the moments of the samples to choose by and of those to
    report on, and the weight of an error."""

    samples: Samples
    split: Split
    metrics: Mapping[str, Metric]
    moments: Mapping[str, tuple[Moments, Moments]]
    weights: Mapping[str, float]


@dataclass(frozen=True, eq=False)
class _Matrix:
    """One part of a layer with the architectures that it gets by the options of its unit, which has this number."""

    unit: int
    fqn: str
    weight: Tensor  # shape: (out_features, in_features)
    architectures: tuple[Architecture | None, ...]


_Found: TypeAlias = Iterator[tuple[_Matrix, int, OutputError, OutputError]]
"""A matrix, the number of an option, and its two errors."""


def look(plan: Plan, model: nn.Module, dense: Mapping[str, Dense], calibrate: Data, count: int | None) -> Seen:
    """Run the model over the samples, which are shared out among fitting, choosing and reporting.

    Raises:
        DataError: fewer than three samples.
    """
    whole = samples_of(calibrate, count=count)
    if len(whole) < LEAST_SAMPLES:
        raise DataError(
            f"{whole.name}: a budget needs at least {LEAST_SAMPLES} samples, to fit to, to choose by and to report on; "
            f"there are {len(whole)}"
        )
    taken = whole.without_held_out()
    calls = {layer.fqn: layer.calls for layer in plan.replaced}
    with changing(model, keep=False) as trial:
        trial.prepare(plan)
        with watched(model, calls) as fit:
            felt = sensitivities(model, list(calls), taken.fit())
        choose, report = (collect(model, calls, part) for part in (taken.held_out(), whole.held_out()))
    return Seen(
        samples=whole,
        split=Split(len(taken) - taken.held_out_count, taken.held_out_count, whole.held_out_count),
        metrics={fqn: metric_of(fit[fqn], bias=dense[fqn].bias is not None) for fqn in calls},
        moments={fqn: (choose[fqn], report[fqn]) for fqn in calls},
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
    missing = Counter(matrix.unit for matrix in matrices for _ in matrix.architectures)
    done = 0
    for matrix, index, chosen_by, held_out in _plain(matrices) if seen is None else _calibrated(matrices, seen):
        of_unit = options[matrix.unit]
        option = of_unit[index]
        of_unit[index] = replace(option, chosen_by=option.chosen_by + chosen_by, held_out=option.held_out + held_out)
        missing[matrix.unit] -= 1
        if not missing[matrix.unit]:
            done += 1
            if progress is not None:
                progress(done, len(units), units[matrix.unit].members[-1][0].fqn)
    return [replace(unit, options=tuple(of_unit)) for unit, of_unit in zip(units, options, strict=True)]


def _plain(matrices: Sequence[_Matrix]) -> _Found:
    with workers() as pool:
        for matrix, errors in zip(matrices, pool.map(_plain_errors, matrices), strict=True):
            for index, error in enumerate(errors):
                yield matrix, index, error, error


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
    @torch.no_grad()
    def reference(matrix: _Matrix) -> list[float]:
        return [moments.mean_square(matrix.weight.to(moments.mean)) for moments in seen.moments[matrix.fqn]]

    with workers() as pool:
        references = dict(zip(matrices, pool.map(reference, matrices), strict=True))
    options = [(matrix, index, each) for matrix in matrices for index, each in enumerate(matrix.architectures)]
    fitted = [(matrix, index, architecture) for matrix, index, architecture in options if architecture is not None]

    @torch.no_grad()
    def finish(number: int, found: Fitted | None) -> list[OutputError]:
        matrix, _, architecture = fitted[number]
        metric = seen.metrics[matrix.fqn]
        weight = matrix.weight.to(metric.gram)
        product = product_of(project(matrix.weight, architecture)).to(weight) if found is None else found.product
        shift = None if metric.mean is None else (weight - product) @ metric.mean
        known = zip(seen.moments[matrix.fqn], references[matrix], strict=True)
        return [output_error(weight, product, shift, moments, reference) for moments, reference in known]

    def weighted(matrix: _Matrix, index: int, errors: Sequence[OutputError]) -> tuple[_Matrix, int, OutputError, OutputError]:
        scale = seen.weights[matrix.fqn]
        chosen_by, held_out = (OutputError(scale * each.squared, scale * each.reference) for each in errors)
        return matrix, index, chosen_by, held_out

    for matrix, index, architecture in options:
        if architecture is None:
            yield weighted(matrix, index, [OutputError(0.0, known) for known in references[matrix]])
    problems = [(matrix.fqn, matrix.weight, architecture) for matrix, _, architecture in fitted]
    for number, errors in fit_products(problems, seen.metrics, finish):
        yield weighted(*fitted[number][:2], errors)
