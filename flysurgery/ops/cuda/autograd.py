"""The backward pass of the CUDA backend in eager calls."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flysurgery.ops.cuda.gradients import all_gradients, hand_out, input_gradient, layer_gradients
from flysurgery.ops.cuda.multiply import multiply
from flysurgery.ops.cuda.trained import TrainedCall


class EagerLinear(torch.autograd.Function):
    """``multiply`` of x in a dtype, with gradients, for tensors that nobody traces: a tenth of the registered operator's overhead."""

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, call: TrainedCall, x: Tensor, *parameters: Tensor
    ) -> Tensor:
        wide = x.dtype == torch.float32  # then dx is, too: PyTorch would convert it after us
        x, count = x.to(call.dtype), call.count
        train = True in ctx.needs_input_grad[2 : 2 + count]
        trained = call.trained(x, parameters) if train else None
        packed = None if trained is None else trained.pack(parameters)
        if trained is None or packed is None:
            y, kept = multiply(x, parameters[:count], parameters[count:], call.linears, call.mode), []
        else:
            y, kept = trained.forward(x, packed)
        ctx.of_call = call, trained, wide, len(kept)
        ctx.save_for_backward(x if train else None, packed, *kept, *parameters)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        call, trained, wide, keeps = ctx.of_call
        linears, count = call.linears, call.count
        x, packed, *others = ctx.saved_tensors
        kept, parameters = others[:keeps], others[keeps:]
        _, needs_x, *needs = ctx.needs_input_grad
        factors, biases = parameters[:count], parameters[count:]
        bias_dtypes = [bias.dtype if need else None for bias, need in zip(biases, needs[count:], strict=True)]
        again = torch.is_grad_enabled()  # for a second derivative, which the registered operators refuse with a reason
        if packed is not None and not again:
            found = trained.backward(dy, x, kept, packed, needs_x, any(bias_dtypes), wide)
            dx, of_factors, of_biases = hand_out(found, factors, bias_dtypes, linears, needs_x)
        else:
            of_all = torch.ops.flysurgery.ks_linear_gradients if again else all_gradients
            of_input = torch.ops.flysurgery.ks_linear_input_gradient if again else input_gradient
            dx, of_factors, of_biases = layer_gradients(dy, x, factors, bias_dtypes, linears, call.mode, needs_x, of_all, of_input)
        return (None, dx, *of_factors, *of_biases)
