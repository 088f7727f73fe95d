"""The leading singular triples of many blocks of one shape."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn.functional import pad

SMALLEST_TRUSTED_RATIO = 1e-3
"""A Gram matrix squares the singular values: with ``s_r >= 1e-3 * s_1`` the relative error stays near 1e-13 in float64."""


def truncated_svd(
    blocks: Tensor,  # shape: (count, b, c), float64
    rank: int,
) -> tuple[Tensor, Tensor, Tensor]:  # shapes: (count, b, rank), (count, rank), (count, rank, c)
    """Compute the ``rank`` leading singular triples (U, S, Vᵀ) of every block; ``U S Vᵀ`` is its best approximation of that rank.

    A rank above ``min(b, c)`` is filled up with zeros. Costs one symmetric eigenproblem of size ``min(b, c)`` a block
    where the singular values allow it, else one SVD.
    """
    if blocks.shape[1] < blocks.shape[2]:
        right, values, left = _of_tall_blocks(blocks.mT, min(rank, blocks.shape[1]))
        left, right = left.mT, right.mT
    else:
        left, values, right = _of_tall_blocks(blocks, min(rank, blocks.shape[2]))
    missing = rank - values.shape[1]
    return pad(left, (0, missing)), pad(values, (0, missing)), pad(right, (0, 0, 0, missing))


def _of_tall_blocks(blocks: Tensor, kept: int) -> tuple[Tensor, Tensor, Tensor]:
    left, values, right = _by_gram_matrix(blocks, kept)
    doubtful = ~(values[:, -1] > SMALLEST_TRUSTED_RATIO * values[:, 0])  # blocks of zeros too
    if doubtful.any():
        with _one_thread():
            U, S, Vh = torch.linalg.svd(blocks[doubtful], full_matrices=False)
        left[doubtful], values[doubtful], right[doubtful] = U[..., :kept], S[:, :kept], Vh[:, :kept]
    return left, values, right


def _by_gram_matrix(blocks: Tensor, kept: int) -> tuple[Tensor, Tensor, Tensor]:
    """With V the leading eigenvectors of BᵀB, ``B V = U S``. Two to five times as fast as an SVD of tall blocks."""
    largest = blocks.abs().amax(dim=(1, 2), keepdim=True)
    scaled = blocks / largest.where(largest > 0, 1.0)  # so that no square overflows or vanishes
    gram = scaled.mT @ scaled
    with _one_thread():
        _, vectors = torch.linalg.eigh(gram)  # ascending
    V = vectors[..., -kept:].flip(-1)
    left = scaled @ V
    values = torch.linalg.vector_norm(left, dim=1)
    return left / values[:, None, :], values * largest[:, 0], V.mT.contiguous()


@contextmanager
def _one_thread() -> Iterator[None]:
    """LAPACK gains next to nothing from threads on blocks this small, and waits for them a hundred times as long on busy cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
