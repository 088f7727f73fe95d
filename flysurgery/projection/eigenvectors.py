"""Eigenvectors of many small symmetric or Hermitian matrices."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from flysurgery.projection.workers import every_core


def leading_eigenvectors(
    matrices: Tensor,  # shape: (count, n, n), float64 and symmetric, or complex128 and Hermitian
    kept: int,
) -> Tensor:  # shape: (count, n, kept), those of the largest eigenvalues first
    """Compute orthonormal eigenvectors of the ``kept`` largest eigenvalues of every matrix.

    PyTorch solves the matrices of a batch one after the other, on a GPU too. So those on a GPU are shared out to all cores of the host.
    """
    if matrices.is_cuda:
        pool, cores = every_core()
        shares = matrices.cpu().chunk(cores)
        found = pool.map(_leading, shares, [kept] * len(shares))
        return torch.cat(list(found)).to(matrices.device)
    with one_thread():
        return _leading(matrices, kept)


def _leading(matrices: Tensor, kept: int) -> Tensor:
    _, vectors = torch.linalg.eigh(matrices)  # ascending
    return vectors[..., matrices.shape[-1] - kept :].flip(-1)


@contextmanager
def one_thread() -> Iterator[None]:
    """LAPACK gains next to nothing from threads on blocks this small, and waits for them a hundred times as long on busy cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
