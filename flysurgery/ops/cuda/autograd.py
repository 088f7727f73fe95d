"""The backward pass of the CUDA backend in eager calls."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flysurgery.ops.cuda.gradients import all_gradients, input_gradient, layer_gradients, split_gradients
from flysurgery.ops.cuda.multiply import multiply
from flysurgery.ops.cuda.trained import trained_for


class EagerLinear(torch.autograd.Function):
    """``multiply`` with gradients, for tensors that nobody traces: a tenth of the registered operator's overhead."""

    @staticmethod
    def forward(ctx: Any, linears: int, mode: str, count: int, x: Tensor, *parameters: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        factors, biases = parameters[:count], parameters[count:]
        needs = ctx.needs_input_grad
        train = any(needs[4 : 4 + count])
        ctx.linears, ctx.mode, ctx.count = linears, mode, count
        ctx.bias_dtypes = [bias.dtype if need else None for bias, need in zip(biases, needs[4 + count :], strict=True)]
        trained = trained_for(x, factors, biases, linears, mode) if train else None
        packed = None if trained is None else trained.pack(factors, biases)
        if trained is None or packed is None:
            ctx.trained = None
            ctx.save_for_backward(x if train else None, *factors)
            return multiply(x, factors, biases, linears, mode)
        ctx.trained, (images, ctx.images) = trained, packed
        ctx.save_for_backward(x, *factors, images)
        return trained.forward(x, ctx.images)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, *saved = ctx.saved_tensors
        factors = saved[: ctx.count]
        needs_x = ctx.needs_input_grad[3]
        of_all, of_input = all_gradients, input_gradient
        if torch.is_grad_enabled():  # a second derivative may follow, which the registered operators refuse with a reason
            of_all, of_input = torch.ops.flysurgery.ks_linear_gradients, torch.ops.flysurgery.ks_linear_input_gradient
        elif ctx.trained is not None:
            weights, *dx = ctx.trained.backward(dy, x, ctx.images, needs_x, any(ctx.bias_dtypes))
            of_factors, of_biases = split_gradients(weights, factors, ctx.bias_dtypes, ctx.linears)
            return (None, None, None, *(dx or (None,)), *of_factors, *(of_biases or ctx.bias_dtypes))
        found = layer_gradients(dy, x, factors, ctx.bias_dtypes, ctx.linears, ctx.mode, needs_x, of_all, of_input)
        dx, of_factors, of_biases = found
        return (None, None, None, dx, *of_factors, *of_biases)
