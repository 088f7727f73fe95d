"""The registered operator of training in halves, for graphs and compilers: linears whose weights change at every step."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from flysurgery.errors import BackendError
from flysurgery.factors import architecture_of
from flysurgery.gpu.gradients import layer_gradients
from flysurgery.gpu.kernel import current_device
from flysurgery.gpu.modes import HALVES
from flysurgery.gpu.operators import check_operands
from flysurgery.gpu.registered import define_differentiable
from flysurgery.gpu.train_backward import keeps_inputs
from flysurgery.gpu.train_forward import TrainedCall

_looks = attrgetter("shape", "dtype", "device")
_calls: dict[tuple[Hashable, ...], TrainedCall] = {}


def _linear(x: Tensor, factors: Sequence[Tensor], biases: Sequence[Tensor], linears: int, mode: str) -> list[Tensor]:
    parameters = (*factors, *biases)
    looks = (linears, mode, len(factors), x.shape[1:], x.dtype, x.device, *map(_looks, parameters))
    call = _calls.get(looks)
    if call is None:  # operands like these have not been checked
        check_operands(x, factors, biases, linears, mode)
        if mode not in HALVES:
            raise BackendError(f"expected one of the modes {', '.join(sorted(HALVES))}, got '{mode}'; use ks_linear for others")
        call = _calls[looks] = TrainedCall(x.dtype, linears, mode, len(factors))
    if x.device.index != current_device():
        with torch.cuda.device(x.device.index):
            return _linear(x, factors, biases, linears, mode)
    trained = call.trained(x, parameters)
    return _empty(x, factors, biases, linears, mode) if trained is None else trained.apart(x, parameters)


def _empty(x: Tensor, factors: Sequence[Tensor], biases: Sequence[Tensor], linears: int, mode: str) -> list[Tensor]:
    architecture = architecture_of(factors[: len(factors) // linears])
    kept = architecture.inner_features if keeps_inputs(architecture, linears) else ()
    return [x.new_empty((x.shape[0], features)) for features in (linears * architecture.out_features, *kept)]


def _remember(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    x, factors, biases, ctx.linears, ctx.mode = inputs
    _, *kept = output
    needs = tree_leaves(ctx.needs_input_grad)[1:]  # flat here, nested in the backward pass
    ctx.bias_dtypes = [bias.dtype if need else None for bias, need in zip(biases, needs[len(factors) :], strict=False)]
    ctx.kept = len(kept)
    ctx.mark_non_differentiable(*kept)
    ctx.save_for_backward(x, *kept, *factors)


def _differentiate(ctx: Any, gradients: Sequence[Tensor]) -> tuple[Any, ...]:
    x, *others = ctx.saved_tensors
    kept, factors = others[: ctx.kept], others[ctx.kept :]
    of_all, of_input = torch.ops.flysurgery.ks_linear_gradients, torch.ops.flysurgery.ks_linear_input_gradient
    operands = (gradients[0], x, factors, ctx.bias_dtypes, ctx.linears, ctx.mode, ctx.needs_input_grad[0])
    return (*layer_gradients(*operands, of_all, of_input, kept), None, None)


define_differentiable(
    "ks_linear_trained(Tensor x, Tensor[] factors, Tensor[] biases, int linears, str mode) -> Tensor[]",
    _linear,
    _empty,
    _differentiate,
    _remember,
)
