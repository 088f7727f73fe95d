"""The backward pass of the CUDA backend, in eager calls and in graphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from flysurgery.ops.cuda.gradients import all_gradients, input_gradient
from flysurgery.ops.cuda.multiply import multiply

Gradients = tuple[Tensor | None, list[Tensor | None], list[Tensor | None]]


def layer_gradients(
    dy: Tensor,  # shape: (rows, linears * out_features)
    x: Tensor | None,  # shape: (rows, in_features), None where no factor needs a gradient
    factors: Sequence[Tensor],
    bias_dtypes: Sequence[torch.dtype | None],
    linears: int,
    mode: str,
    needs_x: bool,
    of_all: Callable[..., list[Tensor]],
    of_input: Callable[..., Tensor],
) -> Gradients:
    """Gradients of x, of the factors and of the biases, those that are needed, by the two functions or operators given.

    Args:
        bias_dtypes: one a bias, None for a bias that needs no gradient.
    """
    dx: Tensor | None = None
    factor_gradients: list[Tensor | None] = [None] * len(factors)
    if x is not None:
        found = of_all(dy, x, factors, linears, mode, needs_x)
        factor_gradients = [*found[: len(factors)]]
        dx = found[-1] if needs_x else None
    elif needs_x:
        dx = of_input(dy, factors, linears, mode)
    parts = dy.chunk(linears, dim=1)
    sums = [None if dtype is None else part.sum(0, dtype=dtype) for part, dtype in zip(parts, bias_dtypes, strict=False)]
    return dx, factor_gradients, sums


class EagerLinear(torch.autograd.Function):
    """``multiply`` with gradients, for tensors that nobody traces: a tenth of the registered operator's overhead."""

    @staticmethod
    def forward(ctx: Any, linears: int, mode: str, count: int, x: Tensor, *parameters: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        factors, biases = parameters[:count], parameters[count:]
        needs = ctx.needs_input_grad
        ctx.linears, ctx.mode, ctx.count = linears, mode, count
        ctx.bias_dtypes = [bias.dtype if need else None for bias, need in zip(biases, needs[4 + count :], strict=True)]
        ctx.save_for_backward(x if any(needs[4 : 4 + count]) else None, *factors)
        return multiply(x, factors, biases, linears, mode)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, *factors = ctx.saved_tensors
        needs_x = ctx.needs_input_grad[3]
        of_all, of_input = all_gradients, input_gradient
        if torch.is_grad_enabled():  # a second derivative may follow, which the registered operators refuse with a reason
            of_all, of_input = torch.ops.flysurgery.ks_linear_gradients, torch.ops.flysurgery.ks_linear_input_gradient
        dx, of_factors, of_biases = layer_gradients(dy, x, factors, ctx.bias_dtypes, ctx.linears, ctx.mode, needs_x, of_all, of_input)
        return (None, None, None, dx, *of_factors, *of_biases)
