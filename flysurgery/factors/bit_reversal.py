"""The permutation between a fast Fourier transform and its butterfly factors."""

from __future__ import annotations

import torch
from torch import Tensor

from flysurgery.errors import PatternError


def bit_reversal(n: int) -> Tensor:  # shape: (n,), int64, on the CPU
    """Order 0 to n-1 by their binary digits read backwards: ``bit_reversal(8)`` is 0, 4, 2, 6, 1, 5, 3, 7.

    The order is its own inverse. The columns of a discrete Fourier transform in this order are exactly a square dyadic butterfly:
    ``factors = project(dft[:, order], square_dyadic(n)).factors`` gives ``ks_linear(x[..., order], factors) == x @ dft.T``.

    Raises:
        PatternError: n is no power of two.

    Source: Cooley and Tukey 1965; Dao et al. 2019, arXiv:1903.05895.
    """
    if n < 1 or n & (n - 1):
        raise PatternError(f"bit reversal needs a power of two, got {n}")
    order = torch.zeros(1, dtype=torch.int64)
    while len(order) < n:
        order = torch.cat((2 * order, 2 * order + 1))
    return order
