"""The optimal projection onto products of two factors: the blocks into which the matrix falls, and their leading singular triples."""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import pad

from flysurgery.patterns import Pattern

SMALLEST_TRUSTED_RATIO = 1e-3
"""A Gram matrix squares the singular values: with ``s_r >= 1e-3 * s_1`` the relative error stays near 1e-13 in float64."""


class Classes:
    """The classes of one side of a product: of its rows, by the pattern of K_1, or of its columns, by that of K_2 transposed.

    Class ``i*d + j`` holds the features ``(i*b + p)*d + j`` and the inner indices ``(i*c + q)*d + j``. A feature and an inner index of one
    class meet in the support, and those of two classes don't. ``of_features`` and ``of_inner`` are the class of each, ``order`` the
    features class after class.
    """

    def __init__(self, pattern: Pattern) -> None:
        self.count = pattern.a * pattern.d
        classes = torch.arange(self.count).reshape(pattern.a, 1, pattern.d)
        self.of_features = classes.expand(-1, pattern.b, -1).flatten()
        self.of_inner = classes.expand(-1, pattern.c, -1).flatten()
        self.order = torch.argsort(self.of_features, stable=True)


class Grid:
    """The blocks of ``K_1 K_2``, one for each row class and column class, for any pair of patterns.

    A block has the shape (b1, c2), and a rank of at most the number of inner indices in both its classes. ``block_of_inner`` is the block
    of each inner index, counted row by row.
    """

    def __init__(self, left: Pattern, right: Pattern) -> None:
        self.rows, self.columns = Classes(left), Classes(right.transpose)
        self.block_of_inner = self.rows.of_inner * self.columns.count + self.columns.of_inner

    def gather(self, matrix: Tensor) -> Tensor:
        """The matrix with its rows and columns sorted by their class; shape (row classes, b1, in_features)."""
        rows, columns = (side.order.to(matrix.device) for side in (self.rows, self.columns))
        return matrix[rows][:, columns].unflatten(0, (self.rows.count, -1))

    def scatter(self, blocks: Tensor) -> Tensor:
        """The inverse of ``gather``; shape (out_features, in_features)."""
        rows, columns = (torch.argsort(side.order).to(blocks.device) for side in (self.rows, self.columns))
        return blocks.flatten(0, 1)[rows][:, columns]


def two_factor(matrix: Tensor, left: Pattern, right: Pattern) -> tuple[Tensor, Tensor]:
    """Find the product ``K_1 K_2`` nearest to ``matrix`` in the Frobenius norm, by one truncated SVD a block.

    The matrix is in float64 or complex128, and so are the factors, of shapes (a1, b1, c1, d1) and (a2, b2, c2, d2). Each singular
    value is shared equally: its square root goes into both factors. Costs ``R*C`` SVDs of b1×c2 blocks for R = a1*d1 row classes and
    C = a2*d2 column classes.

    Source: Dao et al. 2022, arXiv:2204.00595, Theorem 1, which is the case of equal ranks.
    """
    columns, values, rows = block_svd(matrix, left, right)
    root = values.sqrt()[:, None]
    return columns_to_factor(columns * root, left), rows_to_factor(rows * root, right)


def block_svd(matrix: Tensor, left: Pattern, right: Pattern) -> tuple[Tensor, Tensor, Tensor]:
    """Give every inner index its column of K_1, its singular value and its row of K_2, columns and rows of unit norm.

    Their shapes are (inner, b1), (inner,) and (inner, c2). The product is, on each block of the grid, the sum of the rank-one terms of
    the inner indices in both classes. So the best product is the best approximation of each block by a matrix of that rank: the t-th inner
    index of a block takes its t-th singular triple. Inner indices beyond the smaller side of their block get zeros.
    """
    grid = Grid(left, right)
    used, block, ranks = torch.unique(grid.block_of_inner.to(matrix.device), return_inverse=True, return_counts=True)
    by_block = torch.argsort(block, stable=True)
    position = torch.empty_like(block)
    position[by_block] = torch.arange(len(block), device=matrix.device) - (ranks.cumsum(0) - ranks).repeat_interleave(ranks)
    columns = grid.columns.count
    blocks = grid.gather(matrix).unflatten(2, (columns, -1))[used // columns, :, used % columns]
    U, S, Vh = truncated_svd(blocks, int(ranks.max()))
    return U[block, :, position], S[block, position], Vh[block, position]


def columns_to_factor(columns: Tensor, pattern: Pattern) -> Tensor:
    """Store the nonzeros of each column of K, shape (a*c*d, b), as a factor, shape (a, b, c, d), contiguous."""
    return columns.reshape(pattern.a, pattern.c, pattern.d, pattern.b).permute(0, 3, 1, 2).contiguous()


def rows_to_factor(rows: Tensor, pattern: Pattern) -> Tensor:
    """Store the nonzeros of each row of K, shape (a*b*d, c), as a factor, shape (a, b, c, d), contiguous."""
    return rows.reshape(pattern.a, pattern.b, pattern.d, pattern.c).permute(0, 1, 3, 2).contiguous()


def truncated_svd(blocks: Tensor, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the ``rank`` leading singular triples (U, S, Vᴴ) of every block; ``U S Vᴴ`` is its best approximation of that rank.

    Blocks of shape (count, b, c), in float64 or complex128, give shapes (count, b, rank), (count, rank) and (count, rank, c). A rank above
    ``min(b, c)`` is filled up with zeros. Costs one symmetric eigenproblem of size ``min(b, c)`` a block where the singular values allow
    it, else one SVD.
    """
    kept = min(rank, *blocks.shape[1:])
    largest = blocks.abs().amax(dim=(1, 2), keepdim=True)
    scaled = blocks / largest.where(largest > 0, 1.0)  # so that no square overflows or vanishes
    left, values, right = _leading_triples(scaled, kept)
    doubtful = ~(values[:, -1] > SMALLEST_TRUSTED_RATIO * values[:, 0])  # blocks of zeros too
    if doubtful.any():
        with _one_thread():
            U, S, Vh = torch.linalg.svd(scaled[doubtful], full_matrices=False)
        left[doubtful], values[doubtful], right[doubtful] = U[..., :kept], S[:, :kept], Vh[:, :kept]
    missing = rank - kept
    return pad(left, (0, missing)), pad(values * largest[:, 0], (0, missing)), pad(right, (0, 0, 0, missing))


def truncated_product(blocks: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Compute U S and Vᵀ of ``truncated_svd`` without its care for small singular values, and without waiting for the device.

    The square of the error is the least possible to within the rounding of ``‖B‖²``; triples below ``1e-7 * s_1`` may be any.
    """
    kept = min(rank, *blocks.shape[1:])
    left, values, right = _leading_triples(blocks, kept)
    return pad(left * values[:, None], (0, rank - kept)), pad(right, (0, 0, 0, rank - kept))


def _leading_triples(blocks: Tensor, kept: int) -> tuple[Tensor, Tensor, Tensor]:
    """With V the leading eigenvectors of BᴴB, ``B V = U S``. Two to five times as fast as an SVD of tall blocks."""
    if blocks.shape[1] < blocks.shape[2]:
        right, values, left = _leading_triples(blocks.mH, kept)
        return left.mH.resolve_conj(), values, right.mH.resolve_conj()
    V = _leading_eigenvectors(blocks.mH @ blocks, kept)
    left = blocks @ V
    values = torch.linalg.vector_norm(left, dim=1)
    return left / values.where(values > 0, 1.0)[:, None], values, V.mH.resolve_conj()


def _leading_eigenvectors(matrices: Tensor, kept: int) -> Tensor:
    """Those of the largest eigenvalues of Hermitian matrices, the largest first.

    PyTorch solves the matrices of a batch one after the other, on a GPU too. So those on a GPU are shared out to all cores of the host.
    """
    if matrices.is_cuda:
        pool, cores = _every_core()
        found = pool.map(torch.linalg.eigh, matrices.cpu().chunk(cores))
        vectors = torch.cat([each.eigenvectors[..., -kept:] for each in found])
    else:
        with _one_thread():
            vectors = torch.linalg.eigh(matrices).eigenvectors[..., -kept:]
    return vectors.flip(-1).to(matrices.device)


@cache
def _every_core() -> tuple[ThreadPoolExecutor, int]:
    """A pool for jobs of milliseconds, of as many threads as this process may use cores, each with one BLAS thread, and their number."""
    size = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return ThreadPoolExecutor(size, initializer=torch.set_num_threads, initargs=(1,)), size


@contextmanager
def _one_thread() -> Iterator[None]:
    """LAPACK gains next to nothing from threads on blocks this small, and waits for them a hundred times as long on busy cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
