"""Eigenvectors of many small symmetric matrices."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


def leading_eigenvectors(
    matrices: Tensor,  # shape: (count, n, n), float64, symmetric
    kept: int,
) -> Tensor:  # shape: (count, n, kept), those of the largest eigenvalues first
    """Compute orthonormal eigenvectors of the ``kept`` largest eigenvalues of every matrix."""
    with one_thread():
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
