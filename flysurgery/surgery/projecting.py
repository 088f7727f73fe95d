"""Project all planned layers into new modules, aside from the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import sqrt
from time import perf_counter

import torch
from torch import Tensor, nn

from flysurgery.errors import ProjectionError
from flysurgery.projection import Projection, project, workers
from flysurgery.surgery.build import Dense, build
from flysurgery.surgery.calibration_report import RowCalibration
from flysurgery.surgery.fit_parts import Inputs, fit_layers
from flysurgery.surgery.layer_plan import LayerPlan, Part
from flysurgery.surgery.report import PartRow, Row, row_of

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
    for layer, made in _projected(layers, dense) if inputs is None else _fitted(layers, dense, inputs):
        modules[layer.fqn], rows[layer.fqn] = made
        if progress is not None:
            progress(len(modules), len(layers), layer.fqn)
    return modules, rows


Made = tuple[nn.Module, Row]


def _projected(layers: Sequence[LayerPlan], dense: Mapping[str, Dense]) -> Iterator[tuple[LayerPlan, Made]]:
    with workers() as pool:
        jobs = [pool.submit(_project_layer, layer, dense[layer.fqn]) for layer in layers]
        for layer, job in zip(layers, jobs, strict=True):
            yield layer, job.result()


def _project_layer(layer: LayerPlan, dense: Dense) -> Made:
    started = perf_counter()
    projections: list[Projection | None] = []
    for part in layer.parts:
        try:
            projections.append(project(_weight(dense, part), part.architecture) if part.architecture is not None else None)
        except ProjectionError as error:
            raise ProjectionError(f"layer {layer.fqn}: {error}") from error
    return _made(layer, dense, projections, perf_counter() - started)


def _fitted(layers: Sequence[LayerPlan], dense: Mapping[str, Dense], inputs: Mapping[str, Inputs]) -> Iterator[tuple[LayerPlan, Made]]:
    for layer, fit in fit_layers(layers, dense, inputs):
        made = _made(layer, dense[layer.fqn], [part.projection for part in fit.parts], fit.seconds, fit.row())
        fit.correct_biases(made[0])
        yield layer, made


def _made(
    layer: LayerPlan, dense: Dense, projections: Sequence[Projection | None], seconds: float, calibration: RowCalibration | None = None
) -> Made:
    """The new module and its row; parts without a projection stay dense."""
    found = dict(zip(layer.parts, projections, strict=True))

    def weights(part: Part) -> tuple[Tensor, ...]:
        projection = found[part]
        return (_weight(dense, part).clone(),) if projection is None else projection.factors

    rows = [
        PartRow(part.name, "dense", 0.0, 1.0)
        if projection is None
        else PartRow(part.name, str(projection.architecture), projection.relative_error, projection.energy_kept)
        for part, projection in found.items()
    ]
    lost = sum((each.relative_error * _norm(_weight(dense, part))) ** 2 for part, each in found.items() if each is not None)
    norm = _norm(dense.weight.detach())
    return build(layer, dense, weights), row_of(layer, rows, sqrt(lost) / norm if norm else 0.0, seconds, calibration)


def _weight(dense: Dense, part: Part) -> Tensor:
    return dense.weight.detach()[part.start : part.stop].flatten(1)


def _norm(weight: Tensor) -> float:
    return float(torch.linalg.vector_norm(weight.cpu(), dtype=torch.float64))
