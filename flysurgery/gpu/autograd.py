"""The backward pass of the CUDA backend in eager calls."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flysurgery.gpu.gradients import all_gradients, input_gradient, layer_gradients
from flysurgery.gpu.product import run_product


class EagerLinear(torch.autograd.Function):
    """``run_product`` with gradients, for tensors that are not traced. It has a tenth of the registered operator's overhead.

    Args:
        dtype: that of the product, to which x is cast.
        count: how many of the parameters are factors. Biases lie behind them.
    """

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, dtype: torch.dtype, linears: int, mode: str, count: int, x: Tensor, *parameters: Tensor
    ) -> Tensor:
        x = x.to(dtype)
        train = True in ctx.needs_input_grad[5 : 5 + count]
        ctx.of_call = linears, mode, count
        ctx.save_for_backward(x if train else None, *parameters)
        return run_product(x, parameters[:count], parameters[count:], linears, mode)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        linears, mode, count = ctx.of_call
        x, *parameters = ctx.saved_tensors
        factors, biases = parameters[:count], parameters[count:]
        needs = ctx.needs_input_grad
        bias_dtypes = [bias.dtype if need else None for bias, need in zip(biases, needs[5 + count :], strict=True)]
        again = torch.is_grad_enabled()  # for a second derivative, which the registered operators refuse with a reason
        of_all = torch.ops.flysurgery.ks_linear_gradients if again else all_gradients
        of_input = torch.ops.flysurgery.ks_linear_input_gradient if again else input_gradient
        dx, of_factors, of_biases = layer_gradients(dy, x, factors, bias_dtypes, linears, mode, needs[4], of_all, of_input)
        return (None, None, None, None, dx, *of_factors, *of_biases)
