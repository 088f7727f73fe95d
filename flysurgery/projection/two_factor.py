"""The optimal projection onto products of two factors, for any pair of patterns."""

from __future__ import annotations

import torch
from torch import Tensor

from flysurgery.patterns import Architecture, Pattern
from flysurgery.projection.grid import Grid
from flysurgery.projection.truncated_svd import truncated_svd


def two_factor(
    matrix: Tensor,  # shape: (out_features, in_features), float64 or complex128
    architecture: Architecture,
) -> tuple[Tensor, Tensor]:  # shapes: (a1, b1, c1, d1), (a2, b2, c2, d2)
    """Find the product ``K_1 K_2`` nearest to ``matrix`` in the Frobenius norm, by one truncated SVD a block.

    Each singular value is shared equally: its square root goes into both factors. Costs ``R*C`` SVDs of b1×c2 blocks for
    R = a1*d1 row classes and C = a2*d2 column classes.

    Source: Dao et al. 2022, arXiv:2204.00595, Theorem 1, which is the case of equal ranks.
    """
    left, right = architecture.patterns
    columns, values, rows = block_svd(matrix, left, right)
    root = values.sqrt()[:, None]
    return columns_to_factor(columns * root, left), rows_to_factor(rows * root, right)


def block_svd(
    matrix: Tensor,  # shape: (a1*b1*d1, a2*c2*d2), float64 or complex128
    left: Pattern,
    right: Pattern,
) -> tuple[Tensor, Tensor, Tensor]:  # shapes: (inner, b1), (inner,), (inner, c2)
    """Give every inner index its column of K_1, its singular value and its row of K_2, columns and rows of unit norm.

    Inner index m lies in one row class (i1, j1), the rows that column m of K_1 touches, and in one column class (i2, j2), the
    columns that row m of K_2 touches. The classes cut the matrix into a grid of disjoint b1×c2 blocks, and the product
    is, on each block, the sum of the rank-one terms of the inner indices in both classes. So the best product is the
    best approximation of each block by a matrix of that rank: the t-th inner index of a block takes its t-th singular triple.
    Inner indices beyond the smaller side of their block get zeros.
    """
    grid = Grid(Architecture((left, right)))
    used, block, ranks = torch.unique(grid.block_of_inner().to(matrix.device), return_inverse=True, return_counts=True)
    by_block = torch.argsort(block, stable=True)
    position = torch.empty_like(block)
    position[by_block] = torch.arange(len(block), device=matrix.device) - (ranks.cumsum(0) - ranks).repeat_interleave(ranks)
    columns = grid.columns.count
    blocks = grid.gather(matrix).unflatten(2, (columns, -1))[used // columns, :, used % columns]
    U, S, Vh = truncated_svd(blocks, int(ranks.max()))
    return U[block, :, position], S[block, position], Vh[block, position]


def columns_to_factor(
    columns: Tensor,  # shape: (a*c*d, b)
    pattern: Pattern,
) -> Tensor:  # shape: (a, b, c, d), contiguous
    """Store the nonzeros of each column of K as a factor."""
    return columns.reshape(pattern.a, pattern.c, pattern.d, pattern.b).permute(0, 3, 1, 2).contiguous()


def rows_to_factor(
    rows: Tensor,  # shape: (a*b*d, c)
    pattern: Pattern,
) -> Tensor:  # shape: (a, b, c, d), contiguous
    """Store the nonzeros of each row of K as a factor."""
    return rows.reshape(pattern.a, pattern.b, pattern.d, pattern.c).permute(0, 1, 3, 2).contiguous()
