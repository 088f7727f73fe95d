"""The backward pass of the CUDA backend in eager calls."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flysurgery.ops.cuda.gradients import all_gradients, input_gradient, layer_gradients
from flysurgery.ops.cuda.multiply import multiply


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
