"""Fit layers' parts to the inputs that the layers were seen to get, and judge them by others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter

import torch
from torch import Tensor, nn

from flysurgery.errors import ProjectionError
from flysurgery.factors import factors_to_dense
from flysurgery.layers import SplitLinear
from flysurgery.patterns import Architecture
from flysurgery.projection import (
    FitProblem,
    Fitted,
    Metric,
    Moments,
    OutputError,
    Projection,
    calibrated_projection,
    fit_side_by_side,
    metric_of,
    output_error,
    project,
)
from flysurgery.surgery.build import Dense
from flysurgery.surgery.calibration_report import RowCalibration
from flysurgery.surgery.layer_plan import LayerPlan


@dataclass(frozen=True)
class Inputs:
    """The moments of one layer's inputs: on samples to fit with, and on held-out ones."""

    fit: Moments
    held_out: Moments
    permuted: bool = False


@dataclass(frozen=True)
class PartFit:
    """One part of a layer: its factors, None where it stays dense, what its bias takes up, and its errors.

    ``error`` and ``plain``, that of the plain projection, are errors on held-out samples, ``fitted`` is that on the others.
    """

    projection: Projection | None
    shift: Tensor | None
    error: OutputError
    plain: OutputError
    fitted: OutputError
    sweeps: int = 0
    note: str | None = None
    seconds: float = 0.0


@dataclass(frozen=True)
class LayerFit:
    """The parts of one layer, which share its inputs."""

    inputs: Inputs
    shrinkage: float
    parts: tuple[PartFit, ...]

    @property
    def seconds(self) -> float:
        """What all parts took."""
        return sum(part.seconds for part in self.parts)

    def correct_biases(self, new: nn.Module) -> None:
        """Add to the biases of the new module what its parts lose of the mean."""
        modules = list(new.children()) if isinstance(new, SplitLinear) else [new]
        for module, part in zip(modules, self.parts, strict=True):
            bias = module.bias
            if part.shift is not None and isinstance(bias, Tensor):
                with torch.no_grad():
                    bias.copy_(bias.cpu().to(torch.float64) + part.shift)

    def row(self) -> RowCalibration:
        """What is reported of the layer."""
        none = OutputError(0.0, 0.0)
        notes = dict.fromkeys(part.note for part in self.parts if part.note is not None)
        return RowCalibration(
            output_error=sum((part.error for part in self.parts), none).relative,
            plain_output_error=sum((part.plain for part in self.parts), none).relative,
            fit_error=sum((part.fitted for part in self.parts), none).relative,
            sweeps=max(part.sweeps for part in self.parts),
            shrinkage=self.shrinkage,
            rows=self.inputs.fit.rows,
            permuted=self.inputs.permuted,
            note="; ".join(notes) or None,
        )


def fit_layers(
    layers: Sequence[LayerPlan], dense: Mapping[str, Dense], inputs: Mapping[str, Inputs]
) -> Iterator[tuple[LayerPlan, LayerFit]]:
    """Fit the parts of all layers side by side and give each layer as it is done.

    Raises:
        ProjectionError: a weight that cannot be projected; the message names the layer.
    """
    metrics = {layer.fqn: metric_of(inputs[layer.fqn].fit, bias=dense[layer.fqn].bias is not None) for layer in layers}
    parts = [(layer, part) for layer in layers for part in layer.parts]
    weights = [dense[layer.fqn].weight.detach()[part.start : part.stop].flatten(1) for layer, part in parts]
    fitted = [number for number, (_, part) in enumerate(parts) if part.architecture is not None]

    def finish(position: int, found: Fitted | None) -> PartFit:
        layer, part = parts[fitted[position]]
        assert part.architecture is not None
        try:
            return _fit_part(weights[fitted[position]], part.architecture, inputs[layer.fqn], metrics[layer.fqn], found)
        except ProjectionError as error:
            raise ProjectionError(f"layer {layer.fqn}: {error}") from error

    problems = [
        FitProblem(weights[number], part.architecture, metrics[layer.fqn].gram)
        for number, (layer, part) in enumerate(parts)
        if part.architecture is not None
    ]
    done: dict[str, dict[str | None, PartFit]] = {layer.fqn: {} for layer in layers}
    for weight, (layer, part) in zip(weights, parts, strict=True):
        if part.architecture is None:
            done[layer.fqn][part.name] = _kept_part(weight, inputs[layer.fqn])
    for position, found in fit_side_by_side(problems, finish):
        layer, part = parts[fitted[position]]
        done[layer.fqn][part.name] = found
        if len(done[layer.fqn]) == len(layer.parts):
            in_order = tuple(done[layer.fqn][each.name] for each in layer.parts)
            yield layer, LayerFit(inputs[layer.fqn], metrics[layer.fqn].shrinkage, in_order)


@torch.no_grad()
def _kept_part(weight: Tensor, inputs: Inputs) -> PartFit:
    held_out, fit = (_error(weight, weight, None, moments) for moments in (inputs.held_out, inputs.fit))
    return PartFit(None, None, held_out, held_out, fit)


@torch.no_grad()
def _fit_part(weight: Tensor, architecture: Architecture, inputs: Inputs, metric: Metric, fitted: Fitted | None) -> PartFit:
    started = perf_counter()
    found = calibrated_projection(weight, architecture, metric, fitted)
    product = _product(found.projection)
    error = _error(weight, product, found.shift, inputs.held_out)
    plain = error if found.reason else _error(weight, _product(project(weight, architecture)), None, inputs.held_out, error.reference)
    return PartFit(
        projection=found.projection,
        shift=found.shift,
        error=error,
        plain=plain,
        fitted=_error(weight, product, found.shift, inputs.fit),
        sweeps=max(len(found.errors) - 1, 0),
        note=found.reason,
        seconds=perf_counter() - started + (fitted.seconds if fitted is not None else 0.0),
    )


def _error(weight: Tensor, product: Tensor, shift: Tensor | None, moments: Moments, reference: float | None = None) -> OutputError:
    """Where the moments are."""
    on = moments.mean
    return output_error(weight.to(on), product.to(on), None if shift is None else shift.to(on), moments, reference)


def _product(projection: Projection) -> Tensor:
    return factors_to_dense([factor.detach().to("cpu", torch.float64) for factor in projection.factors])
