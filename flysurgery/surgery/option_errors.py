"""What each architecture that a layer may get costs in accuracy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor, nn

from flysurgery.calibration import Data, Samples, collect, samples_of, sensitivities, watched
from flysurgery.errors import DataError
from flysurgery.patterns import Architecture, family_of
from flysurgery.projection import Fitted, Metric, Moments, OutputError, metric_of, output_error, project, workers
from flysurgery.surgery.build import Dense, matrix_of
from flysurgery.surgery.choices import Split
from flysurgery.surgery.plan import LayerPlan, Part, Reason
from flysurgery.surgery.projecting import NO_ERROR, Progress, fit_products, naming, product_of

LEAST_SAMPLES = 3

Errors: TypeAlias = dict[str, tuple[OutputError, OutputError]]
"""By option: the error to choose by, and that on samples held out from the choice; twice the same of a plain projection."""


@dataclass(frozen=True)
class Unit:
    """Parts of layers for which one choice is made, and what it may be, by name: an architecture for the parts of each layer.

    None is dense. ``dense_reason`` says why the layers stay dense where they do.
    """

    members: tuple[tuple[LayerPlan, tuple[Part, ...]], ...]
    options: Mapping[str, tuple[Architecture | None, ...]]
    costs: Mapping[str, float]
    dense_reason: Reason | None = None


@dataclass(frozen=True)
class Seen:
    """What calibration data show of the layers, by name: the metric to fit in, the moments of samples to choose by and of others to
    report on, and the weight of their errors."""

    samples: Samples
    split: Split
    metrics: Mapping[str, Metric]
    moments: Mapping[str, tuple[Moments, Moments]]
    weights: Mapping[str, float]


@dataclass(frozen=True)
class _Matrix:
    """One part of a layer with the choices of its unit, which has this number."""

    unit: int
    fqn: str
    weight: Tensor  # shape: (out_features, in_features)
    options: Mapping[str, Architecture | None]


_Found: TypeAlias = Iterator[tuple[int, str, OutputError, OutputError]]
"""The number of a unit, the name of an option, and its two errors for one matrix."""


def look(layers: Sequence[LayerPlan], model: nn.Module, dense: Mapping[str, Dense], calibrate: Data, count: int | None) -> Seen:
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
    calls = {layer.fqn: layer.calls for layer in layers}
    with watched(model, calls) as fit:
        felt = sensitivities(model, list(calls), taken.fit())
    choose, report = (collect(model, calls, part) for part in (taken.held_out(), whole.held_out()))
    return Seen(
        samples=whole,
        split=Split(len(taken) - taken.held_out_count, taken.held_out_count, whole.held_out_count),
        metrics={fqn: metric_of(fit[fqn], bias=dense[fqn].bias is not None) for fqn in calls},
        moments={fqn: (choose[fqn], report[fqn]) for fqn in calls},
        weights={layer.fqn: felt[layer.fqn] * layer.rows for layer in layers},
    )


def errors_of(units: Sequence[Unit], dense: Mapping[str, Dense], seen: Seen | None, progress: Progress | None) -> list[Errors]:
    """The errors of each unit's options: of calibrated projections by what was ``seen``, else those of plain ones."""
    matrices = [
        _Matrix(number, layer.fqn, matrix_of(dense[layer.fqn], part), {name: each[index] for name, each in unit.options.items()})
        for number, unit in enumerate(units)
        for index, (layer, parts) in enumerate(unit.members)
        for part in parts
    ]
    errors = [dict.fromkeys(unit.options, (NO_ERROR, NO_ERROR)) for unit in units]
    missing = Counter(matrix.unit for matrix in matrices for _ in matrix.options)
    done = 0
    for number, name, by, held_out in _plain(matrices) if seen is None else _calibrated(matrices, seen):
        so_far = errors[number][name]
        errors[number][name] = so_far[0] + by, so_far[1] + held_out
        missing[number] -= 1
        if not missing[number]:
            done += 1
            if progress is not None:
                progress(done, len(units), units[number].members[-1][0].fqn)
    return errors


def _plain(matrices: Sequence[_Matrix]) -> _Found:
    with workers() as pool:
        for matrix, errors in zip(matrices, pool.map(_plain_errors, matrices), strict=True):
            for name, error in errors.items():
                yield matrix.unit, name, error, error


@torch.no_grad()
def _plain_errors(matrix: _Matrix) -> dict[str, OutputError]:
    """Those of low rank are in the squared singular values already."""
    weight = matrix.weight.cpu().to(torch.float64)
    values = torch.linalg.svdvals(weight).square()
    errors = {}
    for name, architecture in matrix.options.items():
        if architecture is None:
            squared = 0.0
        elif family_of(architecture) == "low rank":
            squared = float(values[architecture.inner_features[0] :].sum())
        else:
            with naming(matrix.fqn):
                squared = float((weight - product_of(project(matrix.weight, architecture))).square().sum())
        errors[name] = OutputError(squared, float(values.sum()))
    return errors


def _calibrated(matrices: Sequence[_Matrix], seen: Seen) -> _Found:
    @torch.no_grad()
    def references(matrix: _Matrix) -> list[float]:
        return [moments.mean_square(matrix.weight.to(moments.mean)) for moments in seen.moments[matrix.fqn]]

    with workers() as pool:
        known = list(pool.map(references, matrices))
    options = [(at, name, architecture) for at, matrix in enumerate(matrices) for name, architecture in matrix.options.items()]
    fitted = [(at, name, architecture) for at, name, architecture in options if architecture is not None]

    @torch.no_grad()
    def finish(number: int, found: Fitted | None) -> list[OutputError]:
        at, _, architecture = fitted[number]
        fqn, metric = matrices[at].fqn, seen.metrics[matrices[at].fqn]
        weight = matrices[at].weight.to(metric.gram)
        product = product_of(project(matrices[at].weight, architecture)).to(weight) if found is None else found.product
        shift = None if metric.mean is None else (weight - product) @ metric.mean
        return [output_error(weight, product, shift, *each) for each in zip(seen.moments[fqn], known[at], strict=True)]

    def weighted(at: int, name: str, errors: Sequence[OutputError]) -> tuple[int, str, OutputError, OutputError]:
        scale = seen.weights[matrices[at].fqn]
        by, held_out = (OutputError(scale * each.squared, scale * each.reference) for each in errors)
        return matrices[at].unit, name, by, held_out

    for at, name, architecture in options:
        if architecture is None:
            yield weighted(at, name, [OutputError(0.0, reference) for reference in known[at]])
    problems = [(matrices[at].fqn, matrices[at].weight, architecture) for at, _, architecture in fitted]
    for number, errors in fit_products(problems, seen.metrics, finish):
        yield weighted(*fitted[number][:2], errors)
