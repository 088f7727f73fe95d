"""The backward pass of the CUDA backend in eager calls."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flysurgery.gpu.gradients import all_gradients, input_gradient, layer_gradients
from flysurgery.gpu.run_product import run_product
from flysurgery.gpu.train_forward import TrainedCall


class EagerLinear(torch.autograd.Function):
    """``run_product`` with gradients, for tensors that are not traced. It has a tenth of the registered operator's overhead."""

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, call: TrainedCall, x: Tensor, *parameters: Tensor
    ) -> Tensor:
        wide = x.dtype == torch.float32  # then dx is float32 too: PyTorch would convert it afterwards
        if x.dtype != call.dtype:
            x = x.to(call.dtype)
        count = call.count
        train = True in ctx.needs_input_grad[2 : 2 + count]
        trained = call.trained(x, parameters) if train else None
        done = None if trained is None else trained.forward(x, parameters)
        if done is None:
            done = run_product(x, parameters[:count], parameters[count:], call.linears, call.mode), None, ()
        y, memory, offsets = done
        ctx.of_call = call, trained, offsets, wide
        ctx.save_for_backward(x if train else None, memory, *parameters)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        call, trained, offsets, wide = ctx.of_call
        x, memory, *parameters = ctx.saved_tensors
        needs, count = ctx.needs_input_grad, call.count
        again = torch.is_grad_enabled()  # for a second derivative, which the registered operators refuse with a reason
        if memory is not None and not again:
            with_bias = True in needs[2 + count :]
            dx, found = trained.backward(dy, x, memory, offsets, parameters, needs[1], with_bias, wide)
            if parameters[0].dtype != torch.float32:
                found = [gradient.to(parameters[0].dtype) for gradient in found]
            return (None, dx, *found) if with_bias else (None, dx, *found, *[None] * (len(parameters) - count))
        factors, biases = parameters[:count], parameters[count:]
        bias_dtypes = [bias.dtype if need else None for bias, need in zip(biases, needs[2 + count :], strict=True)]
        of_all = torch.ops.flysurgery.ks_linear_gradients if again else all_gradients
        of_input = torch.ops.flysurgery.ks_linear_input_gradient if again else input_gradient
        dx, of_factors, of_biases = layer_gradients(dy, x, factors, bias_dtypes, call.linears, call.mode, needs[1], of_all, of_input)
        return (None, dx, *of_factors, *of_biases)
