"""The leading singular triples of many blocks of one shape."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import pad

SMALLEST_TRUSTED_RATIO = 1e-3
"""A Gram matrix squares the singular values: with ``s_r >= 1e-3 * s_1`` the relative error stays near 1e-13 in float64."""


def truncated_svd(
    blocks: Tensor,  # shape: (count, b, c), float64 or complex128
    rank: int,
) -> tuple[Tensor, Tensor, Tensor]:  # shapes: (count, b, rank), (count, rank), (count, rank, c)
    """Compute the ``rank`` leading singular triples (U, S, Vᴴ) of every block; ``U S Vᴴ`` is its best approximation of that rank.

    A rank above ``min(b, c)`` is filled up with zeros. Costs one symmetric eigenproblem of size ``min(b, c)`` a block
    where the singular values allow it, else one SVD.
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


def truncated_product(
    blocks: Tensor,  # shape: (count, b, c), float64
    rank: int,
) -> tuple[Tensor, Tensor]:  # shapes: (count, b, rank), (count, rank, c)
    """Compute U S and Vᵀ of ``truncated_svd`` without its care for small singular values, and without waiting for the device.

    The square of the error is the least possible to within the rounding of ``‖B‖²``; triples below ``1e-7 * s_1`` may be any. Costs one
    symmetric eigenproblem of size ``min(b, c)`` a block.
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


def _leading_eigenvectors(
    matrices: Tensor,  # shape: (count, n, n), float64 and symmetric, or complex128 and Hermitian
    kept: int,
) -> Tensor:  # shape: (count, n, kept), those of the largest eigenvalues first
    """Compute orthonormal eigenvectors of the ``kept`` largest eigenvalues of every matrix.

    PyTorch solves the matrices of a batch one after the other, on a GPU too. So those on a GPU are shared out to all cores of the host.
    """
    if matrices.is_cuda:
        pool, cores = _every_core()
        shares = matrices.cpu().chunk(cores)
        found = pool.map(_eigenvectors, shares, [kept] * len(shares))
        return torch.cat(list(found)).to(matrices.device)
    with _one_thread():
        return _eigenvectors(matrices, kept)


@cache
def _every_core() -> tuple[ThreadPoolExecutor, int]:
    """A pool with as many threads as this process may use cores, each with one BLAS thread, and their number.

    It is for jobs of milliseconds that wait for no other, and lasts as long as the process.
    """
    size = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return ThreadPoolExecutor(size, initializer=torch.set_num_threads, initargs=(1,)), size


def _eigenvectors(matrices: Tensor, kept: int) -> Tensor:
    _, vectors = torch.linalg.eigh(matrices)  # ascending
    return vectors[..., matrices.shape[-1] - kept :].flip(-1)


@contextmanager
def _one_thread() -> Iterator[None]:
    """LAPACK gains next to nothing from threads on blocks this small, and waits for them a hundred times as long on busy cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
