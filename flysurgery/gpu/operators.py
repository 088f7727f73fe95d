"""The registered operators: what graphs, compilers and dispatch modes see of the CUDA backend."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch._library.autograd import Info, make_autograd_impl
from torch.utils._pytree import tree_leaves

from flysurgery.errors import BackendError, PatternError
from flysurgery.factors import architecture_of
from flysurgery.gpu.gradients import all_gradients, input_gradient, layer_gradients
from flysurgery.gpu.modes import dtype_of, present_mode
from flysurgery.gpu.product import run_product

_looks = attrgetter("shape", "dtype", "device")
_checked: set[tuple[Hashable, ...]] = set()
_library = torch.library.Library("flysurgery", "FRAGMENT")


def _linear(x: Tensor, factors: Sequence[Tensor], biases: Sequence[Tensor], linears: int, mode: str) -> Tensor:
    looks = (linears, mode, len(factors), x.shape[1:], x.dtype, x.device, *map(_looks, (*factors, *biases)))
    if looks not in _checked:  # operands like these have not been checked
        check_operands(x, factors, biases, linears, mode)
        _checked.add(looks)
    return run_product(x, factors, biases, linears, mode)


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
    narrow = present_mode(dtype)
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
    of_all, of_input = torch.ops.flysurgery.ks_linear_gradients, torch.ops.flysurgery.ks_linear_input_gradient
    needs_x = ctx.needs_input_grad[0]
    return (*layer_gradients(dy, x, factors, ctx.bias_dtypes, ctx.linears, ctx.mode, needs_x, of_all, of_input), None, None)


def _refuse(ctx: Any, *gradients: Any) -> Any:
    raise BackendError("the CUDA kernels have no second derivative; use backend='bmm' where gradients of gradients are needed")


def _define_differentiable(
    schema: str,
    run: Callable[..., Any],
    fake: Callable[..., Any],
    differentiate: Callable[..., Any],
    remember: Callable[..., None] | None = None,
) -> None:
    """Define an operator with gradients.

    Below autograd, as in the passes of a compiled graph, a second operator of the same schema, ``NAME_launched``, replaces it. It has no
    gradients, so the dispatcher calls its kernel directly. Asking Python for gradients first takes as long as several launches.

    Args:
        schema: as ``torch.library`` takes it, the name first, without a namespace.
        run: computes it.
        fake: gives empty tensors of the result's shape, dtype and layout.
        differentiate: its backward pass, as ``torch.library.register_autograd`` takes it.
        remember: fills the context for it.
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


_define_differentiable(
    "ks_linear(Tensor x, Tensor[] factors, Tensor[] biases, int linears, str mode) -> Tensor",
    _linear,
    _fake_linear,
    _differentiate,
    _remember,
)
_define_differentiable(
    "ks_linear_input_gradient(Tensor dy, Tensor[] factors, int linears, str mode) -> Tensor",
    input_gradient,
    _fake_input_gradient,
    _refuse,
)
_define_differentiable(
    "ks_linear_gradients(Tensor dy, Tensor x, Tensor[] factors, int linears, str mode, bool with_input, bool with_bias) -> Tensor[]",
    all_gradients,
    _fake_gradients,
    _refuse,
)
_library.impl("ks_linear", _autocast, "AutocastCUDA")
