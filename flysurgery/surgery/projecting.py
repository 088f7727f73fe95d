"""Project all planned layers into new modules, aside from the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import sqrt
from time import perf_counter

import torch
from torch import Tensor, nn

from flysurgery.errors import ProjectionError
from flysurgery.projection import project
from flysurgery.surgery.build import Dense, build
from flysurgery.surgery.fitting import Inputs, LayerFit
from flysurgery.surgery.layer_plan import LayerPlan, Part
from flysurgery.surgery.report import PartRow, Row, row_of
from flysurgery.surgery.workers import workers

Progress = Callable[[int, int, str], None]
"""Called after each projection with the number done, the number of all, and the layer's name."""


def project_layers(
    layers: Sequence[LayerPlan],
    dense: Mapping[str, Dense],
    progress: Progress | None,
    inputs: Mapping[str, Inputs] | None = None,
) -> tuple[dict[str, nn.Module], dict[str, Row]]:
    """The new modules and the report's rows of ``layers``, by name. The model is only read.

    With ``inputs`` the factors are fitted to what the layers are given, and biases take up what the mean loses; else they are
    those nearest to the weights. Layers run side by side.

    Raises:
        ProjectionError: a weight that cannot be projected; the message names the layer.
    """
    modules: dict[str, nn.Module] = {}
    rows: dict[str, Row] = {}
    with workers() as pool:
        jobs = [pool.submit(_project_layer, layer, dense[layer.fqn], None if inputs is None else inputs[layer.fqn]) for layer in layers]
        for done, (layer, job) in enumerate(zip(layers, jobs, strict=True), start=1):
            modules[layer.fqn], rows[layer.fqn] = job.result()
            if progress is not None:
                progress(done, len(layers), layer.fqn)
    return modules, rows


def _project_layer(layer: LayerPlan, dense: Dense, inputs: Inputs | None) -> tuple[nn.Module, Row]:
    started = perf_counter()
    rows: list[PartRow] = []
    lost = 0.0
    fit = None if inputs is None else LayerFit(inputs, bias=dense.bias is not None)

    def weights(part: Part) -> tuple[Tensor, ...]:
        nonlocal lost
        weight = dense.weight.detach()[part.start : part.stop].flatten(1)
        if part.architecture is None:
            rows.append(PartRow(part.name, "dense", 0.0, 1.0))
            if fit is not None:
                fit.keep(weight)
            return (weight.clone(),)
        try:
            projection = project(weight, part.architecture) if fit is None else fit.project(weight, part.architecture)
        except ProjectionError as error:
            raise ProjectionError(f"layer {layer.fqn}: {error}") from error
        rows.append(PartRow(part.name, str(part.architecture), projection.relative_error, projection.energy_kept))
        lost += (projection.relative_error * _norm(weight)) ** 2
        return projection.factors

    new = build(layer, dense, weights)
    if fit is not None:
        fit.correct_biases(new)
    norm = _norm(dense.weight.detach())
    calibration = None if fit is None else fit.row()
    return new, row_of(layer, rows, sqrt(lost) / norm if norm else 0.0, perf_counter() - started, calibration)


def _norm(weight: Tensor) -> float:
    return float(torch.linalg.vector_norm(weight.cpu(), dtype=torch.float64))
