"""Gradients of a product of factors, by the same kernels on transposed patterns."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flysurgery.factors import pattern_of
from flysurgery.ops.cuda.met import meet
from flysurgery.ops.cuda.multiply import multiply
from flysurgery.ops.cuda.weight_gradient import exact_gradient, weight_gradient_for


def input_gradient(
    dy: Tensor,  # shape: (rows, linears * out_features)
    factors: Sequence[Tensor],  # shapes: (a, b, c, d), left to right; of several linears one after the other
    linears: int,
    mode: str,
) -> Tensor:  # shape: (rows, in_features)
    """``dx = dy @ W``, summed over the linears: one launch a linear where the fused kernel tiles the transposed architecture."""
    length = len(factors) // linears
    parts = dy.chunk(linears, dim=1)
    own = [factors[start : start + length] for start in range(0, len(factors), length)]
    total = multiply(parts[0], own[0], (), 1, mode, transposed=True)
    for part, theirs in zip(parts[1:], own[1:], strict=True):
        total.add_(multiply(part, theirs, (), 1, mode, transposed=True))
    return total


def all_gradients(
    dy: Tensor,  # shape: (rows, linears * out_features)
    x: Tensor,  # shape: (rows, in_features)
    factors: Sequence[Tensor],  # shapes: (a, b, c, d), left to right; of several linears one after the other
    linears: int,
    mode: str,
    with_input: bool,
) -> list[Tensor]:  # shapes: those of the factors, then that of x if asked for
    """Gradients of all factors, and of x.

    The inputs of all factors but the last are computed again from x rather than kept from the forward pass. The
    gradient of x continues the chain that the factors need anyway.
    """
    length = len(factors) // linears
    gradients: list[Tensor] = []
    total: Tensor | None = None
    for index, part in enumerate(dy.chunk(linears, dim=1)):
        own = factors[index * length : (index + 1) * length]
        found, dx = _chain(part, x, own, mode, with_input)
        gradients += found
        if with_input:
            total = dx if total is None else total.add_(dx)
    return gradients if total is None else [*gradients, total]


def _chain(dy: Tensor, x: Tensor, factors: Sequence[Tensor], mode: str, with_input: bool) -> tuple[list[Tensor], Tensor]:
    inputs = [x]  # of the last factor, the one before it, and so on
    for factor in reversed(factors[1:]):
        inputs.append(multiply(inputs[-1], (factor,), (), 1, mode))
    gradients = []
    for left, factor in enumerate(factors, start=1 - len(factors)):
        gradients.append(_factor_gradient(inputs.pop(), dy, factor, mode))
        if left < 0 or with_input:
            dy = multiply(dy, (factor,), (), 1, mode, transposed=True)
    return gradients, dy


def _factor_gradient(x: Tensor, dy: Tensor, factor: Tensor, mode: str) -> Tensor:
    """In the factor's dtype."""
    if x.shape[0] == 0:
        return torch.zeros_like(factor, memory_format=torch.contiguous_format)
    if mode == "exact":
        return exact_gradient(x, dy, pattern_of(factor)).to(factor.dtype)
    kernel = weight_gradient_for(factor, mode, x.shape[0])
    meet(kernel, x.shape[0])
    return kernel.run(x, dy).to(factor.dtype)
