"""Random factors, for training from the start and for architectures that have no projection."""

from __future__ import annotations

import math
from collections.abc import Iterable
from time import perf_counter

import torch
from torch import Tensor, nn

from flysurgery.patterns import Architecture
from flysurgery.projection.project import Projection, as_projection, checked_matrix


def draw(
    factors: Iterable[Tensor],  # shapes: (a, b, c, d), left to right
    architecture: Architecture,
    generator: torch.Generator | None = None,
) -> None:
    """Fill the factors with numbers that give outputs the variance of ``nn.Linear``'s own start.

    ``nn.Linear`` draws its weights uniformly with variance ``1 / (3*in_features)``, which maps inputs of unit variance
    to outputs of variance 1/3. An output of a factor sums c products, so factors of variance ``1 / c`` keep the
    variance, and one of ``1 / (3*c)``, the leftmost, brings the third.
    """
    for index, (factor, pattern) in enumerate(zip(factors, architecture, strict=True)):
        bound = math.sqrt((1 if index == 0 else 3) / pattern.c)
        nn.init.uniform_(factor, -bound, bound, generator)


@torch.no_grad()
def random_start(
    weight: Tensor,  # shape: (out_features, in_features)
    architecture: Architecture,
    seed: int,
) -> Projection:
    """Draw factors of any architecture in the place of the nearest ones, and measure how far their product is from ``weight``.

    Raises:
        PatternError, ProjectionError: as ``project`` does, but that any architecture will do.
    """
    started = perf_counter()
    factors = [torch.empty(pattern.factor_shape, dtype=torch.float64) for pattern in architecture]
    draw(factors, architecture, torch.Generator().manual_seed(seed))
    return as_projection(weight, checked_matrix(weight, architecture), architecture, factors, started)
