"""How long it takes to project a dense matrix, and how near the product of factors comes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch

from flysurgery.bench.multiply import layer_sizes
from flysurgery.errors import PatternError
from flysurgery.patterns import named
from flysurgery.projection import project


@dataclass(frozen=True)
class ProjectionRow:
    """One projection. ``relative_error`` is that of the product, in the Frobenius norm; the fewest of several runs count as ``seconds``."""

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


def bench_projection(
    arch: str, *, width: int = 384, runs: int = 3, seed: int = 0, done: Callable[[Mapping[str, object]], bool] = lambda key: False
) -> Iterator[list[ProjectionRow]]:
    """Project the matrices of a transformer block of the given width: Gaussian ones, the hardest, and ones of quickly falling spectrum.

    The entries of the second kind have singular values 1, 1/2, 1/3, ...: nearer to what trained layers are. Float32 in, work in float64.
    """
    for layer, (out_features, in_features) in layer_sizes(width).items():
        if done({"arch": arch, "layer": layer, "out_features": out_features, "in_features": in_features}):
            continue
        yield [_row(arch, layer, out_features, in_features, matrix, runs, seed) for matrix in ("gaussian", "falling spectrum")]


def _row(arch: str, layer: str, out_features: int, in_features: int, matrix: str, runs: int, seed: int) -> ProjectionRow:
    try:
        architecture = named(arch, out_features, in_features)
    except PatternError as error:
        return ProjectionRow(arch, layer, "", out_features, in_features, 0.0, matrix, f"no: {error}", None, None)
    weight = _matrix(matrix, out_features, in_features, seed)
    results = [project(weight, architecture) for _ in range(runs)]
    head = (arch, layer, str(architecture), out_features, in_features, architecture.density, matrix, "ok")
    return ProjectionRow(*head, min(result.seconds for result in results), results[0].relative_error)


def _matrix(kind: str, out_features: int, in_features: int, seed: int) -> torch.Tensor:  # shape: (out_features, in_features)
    generator = torch.Generator().manual_seed(seed)
    gaussian = torch.randn(out_features, in_features, generator=generator)
    if kind == "gaussian":
        return gaussian
    left, values, right = torch.linalg.svd(gaussian, full_matrices=False)
    return left * (1 / torch.arange(1, len(values) + 1)) @ right
