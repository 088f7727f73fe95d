"""What each architecture that a layer may get costs in accuracy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor, nn

from flysurgery.calibration import Data, Samples, collect, samples_of, sensitivities, watched
from flysurgery.errors import DataError, ProjectionError
from flysurgery.factors import factors_to_dense
from flysurgery.patterns import Architecture
from flysurgery.projection import (
    FitProblem,
    Fitted,
    Metric,
    Moments,
    OutputError,
    fit_side_by_side,
    metric_of,
    output_error,
    project,
    workers,
)
from flysurgery.surgery.build import Dense
from flysurgery.surgery.layer_plan import LayerPlan, Part, Reason
from flysurgery.surgery.tradeoff import Split

DENSE = "dense"
LEAST_SAMPLES = 3

Errors: TypeAlias = Mapping[str, tuple[OutputError, OutputError]]
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
class _Matrix:
    """One part with the choices of its unit, which has this number."""

    unit: int
    fqn: str
    weight: Tensor  # shape: (out_features, in_features)
    options: Mapping[str, Architecture | None]


_Found: TypeAlias = tuple[int, str, tuple[OutputError, OutputError]]
"""The number of a unit, the name of an option, and its errors for one matrix."""


class Judge:
    """What an architecture costs a part in accuracy; ``samples`` and ``split`` say on what, None of a plain projection."""

    def __init__(
        self, layers: Sequence[LayerPlan], model: nn.Module, dense: Mapping[str, Dense], calibrate: Data | None, samples: int | None
    ) -> None:
        self._dense = dense
        self._metrics: dict[str, Metric] = {}
        self._moments: dict[str, tuple[Moments, Moments]] = {}
        self._weights: dict[str, float] = {}
        self.split: Split | None = None
        self.samples: Samples | None = None
        if calibrate is not None:
            self.samples = whole = samples_of(calibrate, count=samples)
            if len(whole) < LEAST_SAMPLES:
                raise DataError(
                    f"{whole.name}: a budget needs at least {LEAST_SAMPLES} samples, to fit to, to choose by and to report on; "
                    f"there are {len(whole)}"
                )
            taken = whole.without_held_out()
            self.split = Split(len(taken) - taken.held_out_count, taken.held_out_count, whole.held_out_count)
            calls = {layer.fqn: layer.calls for layer in layers}
            with watched(model, calls) as fit:
                felt = sensitivities(model, list(calls), taken.fit())
            choose, report = (collect(model, calls, part) for part in (taken.held_out(), whole.held_out()))
            for layer in layers:
                self._metrics[layer.fqn] = metric_of(fit[layer.fqn], bias=dense[layer.fqn].bias is not None)
                self._moments[layer.fqn] = choose[layer.fqn], report[layer.fqn]
                self._weights[layer.fqn] = felt[layer.fqn] * layer.rows

    def errors(self, units: Sequence[Unit]) -> Iterator[tuple[int, Errors]]:
        """The number of each unit with the errors of its options, as they are done."""
        matrices = [
            _Matrix(number, layer.fqn, self._dense[layer.fqn].weight.detach()[part.start : part.stop].flatten(1), of_layer)
            for number, unit in enumerate(units)
            for index, (layer, parts) in enumerate(unit.members)
            for of_layer in [{name: architectures[index] for name, architectures in unit.options.items()}]
            for part in parts
        ]
        none = OutputError(0.0, 0.0)
        sums = [dict.fromkeys(unit.options, (none, none)) for unit in units]
        missing = [sum(len(parts) for _, parts in unit.members) * len(unit.options) for unit in units]
        for unit, name, (by, held_out) in self._plain(matrices) if self.split is None else self._calibrated(matrices):
            sums[unit][name] = sums[unit][name][0] + by, sums[unit][name][1] + held_out
            missing[unit] -= 1
            if not missing[unit]:
                yield unit, sums[unit]

    def _plain(self, matrices: Sequence[_Matrix]) -> Iterator[_Found]:
        with workers() as pool:
            for matrix, errors in zip(matrices, pool.map(_plain_errors, matrices), strict=True):
                for name, error in errors.items():
                    yield matrix.unit, name, (error, error)

    def _calibrated(self, matrices: Sequence[_Matrix]) -> Iterator[_Found]:
        with workers() as pool:
            references = list(pool.map(self._references, matrices))
        options = [(at, name, architecture) for at, each in enumerate(matrices) for name, architecture in each.options.items()]
        fitted = [(at, name, architecture) for at, name, architecture in options if architecture is not None]
        problems = [FitProblem(matrices[at].weight, architecture, self._metrics[matrices[at].fqn].gram) for at, _, architecture in fitted]

        def finish(number: int, found: Fitted | None) -> list[OutputError]:
            at, _, architecture = fitted[number]
            return self._errors(matrices[at], architecture, found, references[at])

        def weighted(at: int, name: str, errors: Sequence[OutputError]) -> _Found:
            scale = self._weights[matrices[at].fqn]
            by, held_out = (OutputError(scale * each.squared, scale * each.reference) for each in errors)
            return matrices[at].unit, name, (by, held_out)

        for at, name, architecture in options:
            if architecture is None:
                yield weighted(at, name, [OutputError(0.0, reference) for reference in references[at]])
        for number, errors in fit_side_by_side(problems, finish):
            at, name, _ = fitted[number]
            yield weighted(at, name, errors)

    @torch.no_grad()
    def _references(self, matrix: _Matrix) -> list[float]:
        return [moments.mean_square(matrix.weight.to(moments.mean)) for moments in self._moments[matrix.fqn]]

    @torch.no_grad()
    def _errors(self, matrix: _Matrix, architecture: Architecture, fitted: Fitted | None, references: Sequence[float]) -> list[OutputError]:
        metric = self._metrics[matrix.fqn]
        weight = matrix.weight.to(metric.gram)
        product = _nearest(matrix, architecture).to(weight) if fitted is None else fitted.product
        shift = None if metric.mean is None else (weight - product) @ metric.mean
        moments = self._moments[matrix.fqn]
        return [output_error(weight, product, shift, each, reference) for each, reference in zip(moments, references, strict=True)]


def _nearest(matrix: _Matrix, architecture: Architecture) -> Tensor:
    try:
        factors = project(matrix.weight, architecture).factors
    except ProjectionError as error:
        raise ProjectionError(f"layer {matrix.fqn}: {error}") from error
    return factors_to_dense([factor.detach().to(torch.float64) for factor in factors])


@torch.no_grad()
def _plain_errors(matrix: _Matrix) -> dict[str, OutputError]:
    """Errors of plain projections; those of low rank are in the squared singular values already."""
    weight = matrix.weight.cpu().to(torch.float64)
    values = torch.linalg.svdvals(weight).square()
    errors = {}
    for name, architecture in matrix.options.items():
        if architecture is None:
            squared = 0.0
        elif len(architecture) == 2 and all(pattern.a == pattern.d == 1 for pattern in architecture):
            squared = float(values[architecture.inner_features[0] :].sum())
        else:
            squared = float((weight - _nearest(matrix, architecture).cpu()).square().sum())
        errors[name] = OutputError(squared, float(values.sum()))
    return errors
