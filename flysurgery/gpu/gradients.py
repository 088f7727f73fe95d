"""Linears that share x, with gradients: of eager calls, and as registered operators, which graphs, compilers and dispatch modes see.

The rows of a batch are summed by one dense product, ``dy.T @ x``, the gradient of the product of the factors. Those of the factors follow
from it at a cost that does not depend on rows.
"""

from collections.abc import Callable, Hashable, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch._library.autograd import Info, make_autograd_impl
from torch.utils._pytree import tree_leaves

from flysurgery.errors import BackendError, PatternError
from flysurgery.factors import architecture_of
from flysurgery.gpu.factor_product import run_product
from flysurgery.gpu.kernel import current_device
from flysurgery.gpu.modes import current_mode, dtype_of
from flysurgery.gpu.row_sums import sum_of_rows
from flysurgery.gpu.uncounted_writes import doubt_trained
from flysurgery.gpu.weight_space import factor_gradients
from flysurgery.torch_state import without_autocast

_looks = attrgetter("shape", "dtype", "device")
_checked: set[tuple[Hashable, ...]] = set()
_library = torch.library.Library("flysurgery", "FRAGMENT")


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
    dy: Tensor,  # shape: (rows, outputs), or (batch, rows, outputs)
    x: Tensor,  # shape: (rows, inputs), or (batch, rows, inputs)
) -> Tensor:  # shape: (outputs, inputs), or (batch, outputs, inputs)
    """``dy.mT @ x``, summed in float32 or wider."""
    if x.dtype.itemsize > 2 or not x.is_cuda:
        wide = torch.promote_types(x.dtype, torch.float32)
        return dy.to(wide).mT @ x.to(wide)
    return (torch.mm if x.dim() == 2 else torch.bmm)(dy.mT, x, out_dtype=torch.float32)


def _needed_gradients(
    dy: Tensor,  # shape: (*batch, linears * out_features)
    x: Tensor | None,  # shape: (*batch, in_features), None where no factor needs a gradient
    factors: Sequence[Tensor],
    bias_dtypes: Sequence[torch.dtype | None],  # None for a bias that needs no gradient
    linears: int,
    mode: str,
    needs_x: bool,
    registered: bool,
) -> tuple[Tensor | None, ...]:
    """Gradients of x, of the factors and of the biases, those that are needed; by the registered operators or by their functions."""
    if x is None:
        of_input = torch.ops.flysurgery.ks_linear_input_gradient if registered else input_gradient
        dx = of_input(dy, factors, linears, mode) if needs_x else None
        parts = dy.reshape(-1, dy.shape[-1]).chunk(linears, dim=1)
        sums = [None if dtype is None else part.sum(0, dtype=dtype) for part, dtype in zip(parts, bias_dtypes, strict=False)]
        return dx, *[None] * len(factors), *sums
    of_all = torch.ops.flysurgery.ks_linear_gradients if registered else all_gradients
    found = of_all(dy, x, factors, linears, mode, needs_x, any(bias_dtypes))
    of_factors = [gradient.to(factor.dtype) for gradient, factor in zip(found, factors, strict=False)]
    of_biases: list[Tensor | None] = [None] * len(bias_dtypes)
    if any(bias_dtypes):
        parts = zip(found[len(factors)].chunk(linears), bias_dtypes, strict=True)
        of_biases = [None if dtype is None else part.to(dtype) for part, dtype in parts]
    return found[-1] if needs_x else None, *of_factors, *of_biases


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
        needs = ctx.needs_input_grad
        bias_dtypes = [bias.dtype if need else None for bias, need in zip(parameters[count:], needs[5 + count :], strict=True)]
        again = torch.is_grad_enabled()  # for a second derivative, which the registered operators refuse with a reason
        found = _needed_gradients(dy, x, parameters[:count], bias_dtypes, linears, mode, needs[4], again)
        return (None, None, None, None, *found)


def check_operands(x: Tensor, factors: Sequence[Tensor], biases: Sequence[Tensor], linears: int, mode: str) -> None:
    """Refuse operands that a kernel would misread. ``ks_linear`` has checked them already; a direct call has not.

    Raises:
        PatternError: shapes that do not fit each other.
        BackendError: a mode for another dtype, or tensors on another device than x.
    """
    if linears < 1 or not factors or len(factors) % linears or len(biases) not in (0, linears):
        counts = f"{len(factors)} factors and {len(biases)} biases"
        raise PatternError(f"expected as many factors for each of {linears} linears, and a bias each or none; got {counts}")
    length = len(factors) // linears
    architectures = {architecture_of(factors[start : start + length]) for start in range(0, len(factors), length)}
    architecture = architectures.pop()
    if architectures:
        raise PatternError(f"expected linears of one architecture, got {architecture} and {architectures.pop()}")
    if x.dim() != 2 or x.shape[1] != architecture.in_features:
        raise PatternError(f"factors {architecture} take rows of {architecture.in_features} features, got x of shape {tuple(x.shape)}")
    if any(tuple(bias.shape) != (architecture.out_features,) for bias in biases):
        shapes = [tuple(bias.shape) for bias in biases]
        raise PatternError(f"factors {architecture} take biases of {architecture.out_features} entries, got shapes {shapes}")
    if x.dtype != dtype_of(mode):
        raise BackendError(f"mode '{mode}' takes {dtype_of(mode)}, got x of {x.dtype}")
    if any(tensor.device != x.device for tensor in (*factors, *biases)):
        raise BackendError(f"expected all tensors on {x.device}, where x is; move the others there")


def _linear(x: Tensor, factors: Sequence[Tensor], biases: Sequence[Tensor], linears: int, mode: str) -> Tensor:
    looks = (linears, mode, len(factors), x.shape[1:], x.dtype, x.device, *map(_looks, (*factors, *biases)))
    if looks not in _checked:  # operands like these have not been checked
        check_operands(x, factors, biases, linears, mode)
        _checked.add(looks)
    return run_product(x, factors, biases, linears, mode)


def _fake_linear(x: Tensor, factors: Sequence[Tensor], biases: Sequence[Tensor], linears: int, mode: str) -> Tensor:
    a, b, _, d = factors[0].shape
    return x.new_empty((x.shape[0], linears * a * b * d))


def _fake_input_gradient(dy: Tensor, factors: Sequence[Tensor], linears: int, mode: str) -> Tensor:
    a, _, c, d = factors[-1].shape
    return dy.new_empty((dy.shape[0], a * c * d))


def _fake_gradients(
    dy: Tensor, x: Tensor, factors: Sequence[Tensor], linears: int, mode: str, with_input: bool, with_bias: bool
) -> list[Tensor]:
    dtype = torch.promote_types(x.dtype, torch.float32)
    found = [x.new_empty(factor.shape, dtype=dtype) for factor in factors]
    if with_bias:
        found.append(x.new_empty(dy.shape[-1], dtype=dtype))
    return [*found, x.new_empty(x.shape)] if with_input else found


def _autocast(x: Tensor, factors: Sequence[Tensor], biases: Sequence[Tensor], linears: int, mode: str) -> Tensor:
    """Round x as autocast rounds the input of a linear layer. Factors stay wide: packing rounds them."""
    dtype = torch.get_autocast_dtype("cuda")
    narrow = current_mode(dtype)
    with torch.autocast("cuda", enabled=False):
        if x.dtype == torch.float32 and narrow is not None:
            x, mode = x.to(dtype), narrow
        return torch.ops.flysurgery.ks_linear(x, factors, biases, linears, mode)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, factors, biases, ctx.linears, ctx.mode = inputs
    needs = tree_leaves(ctx.needs_input_grad)[1:]  # flat here, nested in the backward pass
    ctx.bias_dtypes = [bias.dtype if need else None for bias, need in zip(biases, needs[len(factors) :], strict=False)]
    ctx.save_for_backward(x if any(needs[: len(factors)]) else None, *factors)


def _differentiate(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    x, *factors = ctx.saved_tensors
    dx, *found = _needed_gradients(dy, x, factors, ctx.bias_dtypes, ctx.linears, ctx.mode, ctx.needs_input_grad[0], True)
    return dx, found[: len(factors)], found[len(factors) :], None, None


def _refuse(ctx: Any, *gradients: Any) -> Any:
    raise BackendError("the CUDA kernels have no second derivative; use backend='bmm' where gradients of gradients are needed")


def _define(
    schema: str,
    run: Callable[..., Any],
    fake: Callable[..., Any],
    differentiate: Callable[..., Any] = _refuse,
    remember: Callable[..., None] | None = None,
) -> None:
    """Define an operator with gradients, ``differentiate`` and ``remember`` as ``torch.library.register_autograd`` takes them.

    Below autograd, as in the passes of a compiled graph, a second operator of the same schema, ``NAME_launched``, replaces it. It has no
    gradients, so the dispatcher calls its kernel directly. Asking Python for gradients first takes as long as several launches.
    """
    name = schema.partition("(")[0]
    twin = f"{name}_launched"
    for own in (name, twin):
        _library.define(own + schema.removeprefix(name))
        _library.impl(own, run, "CUDA")
        torch.library.register_fake(f"flysurgery::{own}", fake, lib=_library)
    _library.impl(twin, torch.library.fallthrough_kernel, "Autograd")
    with_gradients = make_autograd_impl(getattr(torch.ops.flysurgery, twin).default, Info(differentiate, remember))
    _library.impl(name, with_gradients, "Autograd", with_keyset=True)


_define(
    "ks_linear(Tensor x, Tensor[] factors, Tensor[] biases, int linears, str mode) -> Tensor",
    _linear,
    _fake_linear,
    _differentiate,
    _remember,
)
_define("ks_linear_input_gradient(Tensor dy, Tensor[] factors, int linears, str mode) -> Tensor", input_gradient, _fake_input_gradient)
_define(
    "ks_linear_gradients(Tensor dy, Tensor x, Tensor[] factors, int linears, str mode, bool with_input, bool with_bias) -> Tensor[]",
    all_gradients,
    _fake_gradients,
)
_library.impl("ks_linear", _autocast, "AutocastCUDA")
