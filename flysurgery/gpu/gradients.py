"""Gradients of linears that share x: the functions of the registered operators, and the split of their results by parameter.

The rows of a batch are summed by one dense product, ``dy.T @ x``, the gradient of the product of the factors. Those of the factors follow
from it at a cost that does not depend on rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from flysurgery.factors import architecture_of
from flysurgery.gpu.kernel import current_device
from flysurgery.gpu.product import run_product
from flysurgery.gpu.row_sums import sum_of_rows
from flysurgery.gpu.uncounted_writes import doubt_trained
from flysurgery.gpu.weight_space import factor_gradients
from flysurgery.torch_state import without_autocast

Gradients = tuple[Tensor | None, Sequence[Tensor | None], Sequence[Tensor | None]]


def input_gradient(
    dy: Tensor,  # shape: (*batch, linears * out_features)
    factors: Sequence[Tensor],  # shapes: (a, b, c, d), left to right; of several linears one after the other
    linears: int,
    mode: str,
) -> Tensor:  # shape: (*batch, in_features)
    """``dx = dy @ W``: one linear by its transposed factors, several by one dense product with what their factors give for unit rows.

    The dense product replaces a launch for each linear and the sums between them.
    """
    if linears == 1:
        return run_product(dy, factors, (), 1, mode, transposed=True)
    with without_autocast(dy.device.type):
        units = torch.eye(architecture_of(factors[: len(factors) // linears]).in_features, dtype=dy.dtype, device=dy.device)
        return dy @ run_product(units, factors, (), linears, mode).t()


def all_gradients(
    dy: Tensor,  # shape: (*batch, linears * out_features)
    x: Tensor,  # shape: (*batch, in_features)
    factors: Sequence[Tensor],  # shapes: (a, b, c, d), left to right; of several linears one after the other
    linears: int,
    mode: str,
    with_input: bool,
    with_bias: bool,
) -> list[Tensor]:
    """Gradients of all factors and, if asked for, of the biases side by side, float32 or wider; then that of x if asked for."""
    device_index = x.device.index
    if device_index != current_device():
        with torch.cuda.device(device_index):
            return all_gradients(dy, x, factors, linears, mode, with_input, with_bias)
    with without_autocast(x.device.type):
        rows, given = dy.reshape(-1, dy.shape[-1]), x.reshape(-1, x.shape[-1])
        dtype = torch.promote_types(x.dtype, torch.float32)
        found = [gradient.to(dtype) for gradient in factor_gradients(summed(rows, given), factors, linears)]
        if with_bias:
            found.append(sum_of_rows(rows, dtype))
        if with_input:
            found.append(input_gradient(dy, factors, linears, mode))
    doubt_trained(factors)  # behind all that is derived from them here
    return found


def summed(
    dy: Tensor,  # shape: (rows, outputs)
    x: Tensor,  # shape: (rows, inputs)
) -> Tensor:  # shape: (outputs, inputs)
    """``dy.T @ x``, summed in float32 or wider."""
    if x.dtype.itemsize > 2 or not x.is_cuda:
        wide = torch.promote_types(x.dtype, torch.float32)
        return dy.to(wide).t() @ x.to(wide)
    return torch.mm(dy.t(), x, out_dtype=torch.float32)


def layer_gradients(
    dy: Tensor,  # shape: (*batch, linears * out_features)
    x: Tensor | None,  # shape: (*batch, in_features), None where no factor needs a gradient
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
    if x is None:
        dx = of_input(dy, factors, linears, mode) if needs_x else None
        parts = dy.reshape(-1, dy.shape[-1]).chunk(linears, dim=1)
        sums = [None if dtype is None else part.sum(0, dtype=dtype) for part, dtype in zip(parts, bias_dtypes, strict=False)]
        return dx, [None] * len(factors), sums
    found = of_all(dy, x, factors, linears, mode, needs_x, any(bias_dtypes))
    of_factors = [gradient.to(factor.dtype) for gradient, factor in zip(found, factors, strict=False)]
    of_biases: list[Tensor | None] = [None] * len(bias_dtypes)
    if any(bias_dtypes):
        parts = zip(found[len(factors)].chunk(linears), bias_dtypes, strict=True)
        of_biases = [None if dtype is None else part.to(dtype) for part, dtype in parts]
    return found[-1] if needs_x else None, of_factors, of_biases


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
