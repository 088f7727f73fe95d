"""The definition of the product with a Kronecker-sparse factor, which everything else is held against."""

from __future__ import annotations

import torch
from torch import Tensor

from flysurgery.errors import PatternError
from flysurgery.factors.storage import pattern_of


def ks_einsum(
    x: Tensor,  # shape: (*batch, a*c*d)
    factor: Tensor,  # shape: (a, b, c, d)
) -> Tensor:  # shape: (*batch, a*b*d), a fresh tensor
    """Multiply the rows of ``x`` by a Kronecker-sparse factor: ``x @ K.T``.

    ``y[i, p, j] = sum over q of x[i, q, j] * factor[i, p, q, j]`` with rows of x seen as ``(a, c, d)`` and rows of y as
    ``(a, b, d)``. Costs ``2*a*b*c*d`` flops per row. Any floating or complex dtype, any device, and gradients of any order.

    Raises:
        PatternError: ``x.shape[-1] != a*c*d``; the message gives both numbers.

    Source: Gonon et al. 2024, arXiv:2405.15013, Algorithm 1.
    """
    pattern = pattern_of(factor)
    if x.dim() == 0 or x.shape[-1] != pattern.in_features:
        raise PatternError(f"a factor of pattern {pattern} takes rows of {pattern.in_features} features, got x of shape {tuple(x.shape)}")
    rows = x.reshape(*x.shape[:-1], pattern.a, pattern.c, pattern.d)  # unflatten is Python, which PyTorch 2.11 does not export everywhere
    return torch.einsum("...iqj,ipqj->...ipj", rows, factor).flatten(-3)
