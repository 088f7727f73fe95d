"""Times the multiplication and the projection of the linears of a transformer block, backend by backend."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flysurgery.bench.ceilings import Work, measure_ceilings
from flysurgery.bench.measuring import DEFAULT_PROTOCOL, Measured, Protocol, checked_rows, launch_on, measure, rows_of
from flysurgery.bench.timing import in_mode
from flysurgery.bench.units import layer_sizes
from flysurgery.bench.variants import by_definition, dense_linear
from flysurgery.errors import PatternError
from flysurgery.layers import ButterflyLinear
from flysurgery.ops import BACKENDS, Problem, explain
from flysurgery.patterns import Architecture, named
from flysurgery.projection import project

BASELINE = "linear"
"""The candidate that stands for the dense layer, an ``nn.Linear``."""

CHECKED_ROWS = 4096
"""This many rows at either end are held against float64."""

MATRICES = ("gaussian", "falling spectrum")
"""Matrices to project: the hardest, and one with singular values 1, 1/2, 1/3, ..., which is nearer to trained layers."""


@dataclass(frozen=True)
class MultiplyRow:
    """One candidate on one layer.

    ``candidate`` is ``linear`` (an nn.Linear), ``linear again`` (the same, which shows the noise of the run), a backend with its
    weights prepared, or ``layer``: a ButterflyLinear as it stands in a model, with the backend that it chose in ``backend``.
    """

    arch: str
    layer: str
    architecture: str
    out_features: int
    in_features: int
    density: float
    rows: int
    mode: str
    device_type: str
    candidate: str
    backend: str | None
    measured: Measured


@dataclass(frozen=True)
class ProjectionRow:
    """One projection. ``relative_error`` is that of the product, in the Frobenius norm; ``seconds`` is the shortest of several runs."""

    arch: str
    layer: str
    architecture: str
    out_features: int
    in_features: int
    density: float
    matrix: str
    status: str
    seconds: float | None
    relative_error: float | None


def bench_multiply(
    arch: str,
    *,
    width: int = 384,
    rows: int = 3152,
    mode: str = "fp32",
    device: torch.device | str = "cpu",
    protocol: Protocol = DEFAULT_PROTOCOL,
    quick: bool = False,
    done: Callable[[Mapping[str, object]], bool] = lambda key: False,
) -> Iterator[list[MultiplyRow]]:
    """Measure every backend on the layers of a transformer block of the given width, layer by layer.

    ``rows`` counts tokens; the default is 16 images of 197 tokens. Weights are random, and the dense layer is the product of the same
    factors. ``done`` gets what identifies a layer; True leaves the layer out.

    Raises:
        OptionError: there is no architecture of that name.
        PatternError: it does not exist at this width for any of the layers.
    """
    missing: list[str] = []
    device = torch.device(device)
    for layer, (out_features, in_features) in layer_sizes(width).items():
        try:
            architecture = named(arch, out_features, in_features)
        except PatternError as error:
            missing.append(str(error))
            continue
        sizes = {"out_features": out_features, "in_features": in_features, "density": architecture.density}
        run = {"rows": rows, "mode": mode, "device_type": device.type}
        head = {"arch": arch, "layer": layer, "architecture": str(architecture), **sizes, **run}
        if not done(head | {"candidate": BASELINE, "launch": launch_on(device, protocol)}):
            yield _multiply_rows(head, architecture, device, protocol, quick=quick)
    if len(missing) == 3:
        raise PatternError(f"no layer of width {width} has an architecture '{arch}': {missing[0]}")


def _multiply_rows(
    head: dict[str, Any], architecture: Architecture, device: torch.device, protocol: Protocol, *, quick: bool
) -> list[MultiplyRow]:
    torch.manual_seed(protocol.seed)
    rows, mode = head["rows"], head["mode"]
    with in_mode(mode) as dtype:
        # outside inference mode, like a model's parameters: the packed weights of inference tensors cannot be kept
        layer = ButterflyLinear(architecture, device=device, dtype=dtype).requires_grad_(False)
        with torch.inference_mode():
            x = torch.randn(rows, architecture.in_features, device=device, dtype=dtype)
            problem = Problem(architecture, rows, dtype, device.type, bias=True, allow_tf32=device.type == "cuda" and mode == "tf32")
            refused = {name: reason for name, backend in BACKENDS.items() if (reason := backend.can_run(problem)) is not None}
            candidates: dict[str, Callable[[Tensor], Tensor]] = {BASELINE: dense_linear(layer), "layer": layer}
            candidates |= {name: each.bind(tuple(layer.factors), layer.bias) for name, each in BACKENDS.items() if name not in refused}
            checked = checked_rows(rows, CHECKED_ROWS)
            dense, own = _works(architecture, x)
            found = measure(
                candidates,
                x,
                by_definition(layer).double()(x[checked].double()),
                baseline=BASELINE,
                rows=checked,
                refused=refused,
                works={name: dense if name in (BASELINE, "dense") else own for name in candidates},
                ceilings=measure_ceilings(mode, device, quick=quick),
                protocol=protocol,
            )
    backends = {"layer": explain(problem).choice} | {name: name for name in BACKENDS}
    return rows_of(MultiplyRow, head, found, (BASELINE, "layer", *BACKENDS), backend=backends)


def _works(architecture: Architecture, x: Tensor) -> tuple[Work, Work]:
    """Give what the multiplication must spend, dense and by factors."""
    rows, size = x.shape[0], x.element_size()
    ends = rows * (architecture.in_features + architecture.out_features) + architecture.out_features
    dense = architecture.in_features * architecture.out_features
    by_factors = Work(size * (ends + architecture.num_parameters), rows * architecture.flops_per_row)
    return Work(size * (ends + dense), 2 * rows * dense), by_factors


def bench_projection(
    arch: str, *, width: int = 384, runs: int = 3, seed: int = 0, done: Callable[[Mapping[str, object]], bool] = lambda key: False
) -> Iterator[list[ProjectionRow]]:
    """Project each of ``MATRICES`` in the sizes of a transformer block of the given width; float32 in, work in float64."""
    for layer, (out_features, in_features) in layer_sizes(width).items():
        head = {"arch": arch, "layer": layer, "out_features": out_features, "in_features": in_features}
        if done(head):
            continue
        try:
            architecture = named(arch, out_features, in_features)
        except PatternError as error:
            nothing = {"architecture": "", "density": 0.0, "status": f"no: {error}", "seconds": None, "relative_error": None}
            yield [ProjectionRow(**head, **nothing, matrix=matrix) for matrix in MATRICES]
            continue
        columns = head | {"architecture": str(architecture), "density": architecture.density, "status": "ok"}
        found = []
        for matrix in MATRICES:
            results = [project(_matrix(matrix, out_features, in_features, seed), architecture) for _ in range(runs)]
            seconds = min(result.seconds for result in results)
            found.append(ProjectionRow(**columns, matrix=matrix, seconds=seconds, relative_error=results[0].relative_error))
        yield found


def _matrix(kind: str, out_features: int, in_features: int, seed: int) -> Tensor:  # shape: (out_features, in_features)
    gaussian = torch.randn(out_features, in_features, generator=torch.Generator().manual_seed(seed))
    if kind == "gaussian":
        return gaussian
    left, values, right = torch.linalg.svd(gaussian, full_matrices=False)
    return left * (1 / torch.arange(1, len(values) + 1)) @ right
