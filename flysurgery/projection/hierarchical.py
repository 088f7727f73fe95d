"""Projection onto products of three factors and more, by splitting one factor off at a time."""

from __future__ import annotations

from itertools import accumulate, pairwise

import torch
from torch import Tensor

from flysurgery.errors import ProjectionError
from flysurgery.factors import dense_to_factor, factor_to_dense
from flysurgery.patterns import Architecture, product_pattern
from flysurgery.projection.two_factor import block_svd, columns_to_factor, rows_to_factor


def hierarchical(
    matrix: Tensor,  # shape: (out_features, in_features), float64 or complex128
    architecture: Architecture,
) -> tuple[Tensor, ...]:  # shapes: (a, b, c, d), left to right
    """Approximate ``matrix`` by a product of L factors of a chainable architecture.

    The left-most factor is split off by an optimal two-factor projection whose columns are orthonormal on each block, and
    what is left of the matrix, now in the next factors, is split in the same way. Because of the orthonormal columns the
    squared errors of the L-1 steps add up, and no step exceeds the optimum: the error is at most ``sqrt(L-1)`` times the
    smallest possible one, and zero for an exact product. In the end the factors are scaled so that their largest entries are
    of one magnitude.

    Raises:
        ProjectionError: the architecture is not chainable, where no algorithm with a guarantee is known.

    Source: Le, Zheng, Riccietti and Gribonval 2024, arXiv:2411.04506.
    """
    if not architecture.is_chainable:
        left, right = next(pair for pair in pairwise(architecture) if not Architecture(pair).is_chainable)
        raise ProjectionError(
            f"a product of more than two factors needs neighbours that are chainable, and {left},{right} are not chainable; "
            f"choose others, any two factors, or random factors to train from (--init random; init='random' in Python)"
        )
    # the patterns of K_1 ... K_L, K_2 ... K_L, and so on to K_L
    tails = list(accumulate(reversed(architecture.patterns), lambda tail, pattern: product_pattern(pattern, tail)))[::-1]
    factors: list[Tensor] = []
    remainder = dense_to_factor(matrix, tails[0])
    for pattern, tail in zip(architecture.patterns, tails[1:], strict=False):
        columns, values, rows = block_svd(factor_to_dense(remainder), pattern, tail)
        factors.append(columns_to_factor(columns, pattern))
        remainder = rows_to_factor(rows * values[:, None], tail)
    return of_equal_magnitude([*factors, remainder])


def of_equal_magnitude(factors: list[Tensor]) -> tuple[Tensor, ...]:
    """Share the magnitude out, so that no factor is near the ends of half precision's range before the others are."""
    largest = torch.stack([factor.abs().amax() for factor in factors])
    if not largest.all():
        return tuple(factors)
    common = largest.log().mean().exp()
    return tuple(factor * (common / own) for factor, own in zip(factors, largest, strict=True))
