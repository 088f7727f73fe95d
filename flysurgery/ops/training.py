"""Fused operations with gradients: what stands between two attentions, forward and backward, in few launches.

The forward pass multiplies by the kernels of inference where they take an operation, and keeps its input, the norm before q, k and v, and
of wide feed-forward blocks what lies before the last factor.
The backward pass computes hidden units again: that costs less than to store them and to load them. It multiplies factors out: the gradient
of a weight is a dense product in any case, and the gradients of both factors are computed from it. Wide feed-forward blocks whose hidden
units read whole blocks of both factors are multiplied factor by factor in both directions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flysurgery.gpu.device import kernels_take, shared_limit_of
from flysurgery.gpu.factor_by_factor import run_wide_ffn
from flysurgery.gpu.factor_product import run_product
from flysurgery.gpu.gradients import summed
from flysurgery.gpu.graph_branch import Branch, ahead
from flysurgery.gpu.hidden_gradient import hidden_gradient_takes, hidden_image, run_hidden_gradient
from flysurgery.gpu.layer_norm import norm_gradient, normalize_rows
from flysurgery.gpu.modes import mode_for
from flysurgery.gpu.operands import FusedFactors, Gated, Linear, Norm, present
from flysurgery.gpu.row_sums import activation_gradient, keep_sums, known_sums, sum_of_rows
from flysurgery.gpu.uncounted_writes import doubt_trained
from flysurgery.gpu.weight_cache import training
from flysurgery.gpu.wide_gradient import WideGradient, by_output, takes_wide_gradient, wide_gradient
from flysurgery.ops.as_dense import AsDense, as_dense, of_linears
from flysurgery.ops.choose_launches import Operation, reason, run
from flysurgery.ops.feed_forward import ACTIVATIONS, FeedForward, takes_each_factor
from flysurgery.ops.linears import LayerNorm, LinearResidual, NormLinears
from flysurgery.ops.one_launch import epilogue_reason, in_one_launch, linear_epilogue, whole_reason
from flysurgery.torch_state import is_tracing, refuse_second_derivative, without_autocast

Kept = Sequence[Any]
"""What the backward pass needs besides x and the operation's own tensors: tensors and None."""


def training_reason(x: Tensor, operation: Operation) -> str | None:
    """Why an operation has no fused gradients; None where it has."""
    if not isinstance(operation, NormLinears | LinearResidual | FeedForward | LayerNorm):
        return "it has no fused gradients"
    if isinstance(operation, FeedForward) and (isinstance(operation.up, Gated) or operation.inner is not None):
        return "the fused gradients of feed-forward blocks know neither gates nor inner norms"
    if is_tracing(x, *operation.tensors):
        return "fused gradients take plain tensors, outside of compilers, transforms and modes"
    return operation.wrong(x)


def trained(x: Tensor, operation: Operation) -> Tensor:
    """The result of an operation, with gradients of x and of all of its tensors, where ``training_reason`` is None.

    Shapes are those of the operation's definition. All is computed in the dtype of x, sums and gradients of weights in float32 or wider;
    the weights may be wider than x. There is no second derivative. On CUDA kernels compute norms, sums, the gradients of hidden
    units and, where they can, products of factors. PyTorch computes the other products, and everything elsewhere.
    """
    result: Any = _Trained.apply(operation, x, *operation.tensors)
    return result


def trained_with_x(x: Tensor, operation: NormLinears) -> tuple[Tensor, Tensor]:
    """What ``trained`` gives, and x for its other uses: their gradient is added in the launch of the norm's gradient."""
    result: Any = _TrainedWithX.apply(operation, x, *operation.tensors)
    return result


class _Trained(torch.autograd.Function):
    """An operation whose tensors follow x, so that gradients find them."""

    @staticmethod
    def forward(ctx: Any, operation: Any, x: Tensor, *tensors: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        with without_autocast(x.device.type), training():
            y, kept = _FORWARD[type(operation)](rows, operation)
        if isinstance(operation, LinearResidual):
            operation = operation._replace(residual=x.new_empty(0))  # it is never read again
        ctx.save_for_backward(rows, *operation.tensors, *kept)
        ctx.operation, ctx.shape = operation, x.shape
        return torch.ops.aten._unsafe_view(y, (*x.shape[:-1], y.shape[-1]))  # no view for autograd, so that q, k and v are its views

    @staticmethod
    def backward(ctx: Any, dy: Tensor, *beside: Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        refuse_second_derivative()
        operation, (_, needs_x, *needs) = ctx.operation, ctx.needs_input_grad
        rows, *saved = ctx.saved_tensors  # which raises if one of the operation's tensors has been written to
        learning = [tensor for tensor, need in zip(operation.tensors, needs, strict=True) if need and tensor.requires_grad]
        with without_autocast(dy.device.type), training():
            flat = dy.reshape(-1, dy.shape[-1]).contiguous()
            others = [each.reshape(rows.shape) for each in beside if needs_x]
            keep_sums(flat, known_sums(dy))
            branch = Branch(dy.device)
            dx, found = _BACKWARD[type(operation)](flat, rows, operation, saved[len(needs) :], {*map(id, learning)}, branch, *others)
            branch.join()
        doubt_trained(learning)  # behind all that the block derives from them
        if isinstance(operation, LinearResidual):
            found = found._replace(residual=dy)
        gradients = [gradient if need else None for gradient, need in zip(found.tensors, needs, strict=True)]
        shaped = dx.view(ctx.shape)
        keep_sums(shaped, known_sums(dx))
        return (None, shaped if needs_x else None, *gradients)


class _TrainedWithX(_Trained):
    """The same with x as a second result, of which ``beside`` is the gradient."""

    @staticmethod
    def forward(ctx: Any, operation: Any, x: Tensor, *tensors: Tensor) -> Any:
        return _Trained.forward(ctx, operation, x, *tensors), x


def _gradients(
    dy: Tensor,  # shape: (rows, sum of all out_features)
    x: Tensor,  # shape: (rows, in_features)
    dense: AsDense,
    group: tuple[Linear, ...],
    scale: Tensor | None,
    learning: set[int],  # the ids of tensors that do
    branch: Branch,
    of_bias: Tensor | None = None,  # shape: (parts, out_features); its sum is that of dy over rows
) -> tuple[tuple[Linear, ...], Tensor | None]:
    """The gradients of linears and of the scale behind them; they themselves where none of them learns."""
    if not any(id(tensor) in learning for tensor in present(*[tensor for each in group for tensor in each.tensors], scale)):
        return group, scale
    parts = known_sums(dy) if of_bias is None else of_bias
    wide = torch.promote_types(dy.dtype, torch.float32)
    sums = None if parts is None else branch.run(sum_of_rows, parts, wide)  # before the product, which leaves it no multiprocessor
    of_weight = summed(dy, x)
    sums = branch.run(sum_of_rows, dy, wide) if sums is None else sums
    return branch.run(of_linears, of_weight, sums, group, scale, dense.matrix)


def _back_norm(x: Tensor, gradient: Tensor, norm: Norm, beside: Tensor | None) -> tuple[Tensor, Norm]:
    """The gradients of x, which keeps the sums of its rows, and of a norm's weight and bias in their dtypes."""
    found = norm_gradient(x, gradient, norm.weight, norm.eps, beside)
    keep_sums(found.x, found.sums)
    of_weight = None if norm.weight is None else found.weight.to(norm.weight.dtype)
    return found.x, Norm(of_weight, None if norm.bias is None else found.bias.to(norm.bias.dtype), norm.eps)


def _layer_norm(x: Tensor, given: LayerNorm) -> tuple[Tensor, Kept]:
    return normalize_rows(x, *given.norm), ()


def _back_layer_norm(dy: Tensor, x: Tensor, given: LayerNorm, kept: Kept, learning: set[int], branch: Branch) -> tuple[Tensor, LayerNorm]:
    dx, norm = _back_norm(x, dy, given.norm, None)
    return dx, LayerNorm(norm)


def _norm_linears(x: Tensor, given: NormLinears) -> tuple[Tensor, Kept]:
    normed, group = normalize_rows(x, *given.norm), given.group
    factors = [member for member in group if isinstance(member, FusedFactors)]
    if len(factors) == len(group) and _halves(x) and in_one_launch(x, factors, norm=False):
        biases = [member.bias for member in factors if member.bias is not None]
        parts = [factor for member in factors for factor in member.factors]
        return run_product(normed, parts, biases, len(group), mode_for(x)), (normed,)
    dense = _dense(group, None, x.dtype)
    return dense(normed), (normed, *dense)


def _back_norm_linears(
    dy: Tensor, x: Tensor, given: NormLinears, kept: Kept, learning: set[int], branch: Branch, beside: Tensor | None = None
) -> tuple[Tensor, NormLinears]:
    normed, dense = kept[0], _dense(given.group, None, x.dtype, kept[1:], bias=False)
    group, _ = _gradients(dy, normed, dense, tuple(given.group), None, learning, branch)
    dx, norm = _back_norm(x, dy @ dense.weight, given.norm, beside)
    return dx, NormLinears(norm, group)


def _linear_residual(x: Tensor, given: LinearResidual) -> tuple[Tensor, Kept]:
    given = given._replace(residual=given.residual.reshape(-1, given.residual.shape[-1]))
    if _halves(x) and reason(x, given) is None:
        return run(x, given), ()
    dense = _dense((given.linear,), given.scale, x.dtype)
    return dense(x).add_(given.residual), dense


def _back_linear_residual(
    dy: Tensor, x: Tensor, given: LinearResidual, kept: Kept, learning: set[int], branch: Branch
) -> tuple[Tensor, LinearResidual]:
    dense = _dense((given.linear,), given.scale, x.dtype, kept, bias=False)
    (linear,), scale = _gradients(dy, x, dense, (given.linear,), given.scale, learning, branch)
    return dy @ dense.weight, given._replace(linear=linear, scale=scale)


def _feed_forward(x: Tensor, given: FeedForward) -> tuple[Tensor, Kept]:
    norm, up, down, activation, scale, residual, *_ = given
    assert not isinstance(up, Gated), "training_reason says so"
    if _halves(x) and isinstance(up, FusedFactors) and isinstance(down, FusedFactors):
        if whole_reason(x, norm, up, down) is None:
            return run(x, given), ()
        if takes_each_factor(x, up, down):  # with the norm in their weights, packing would take more launches
            y, between = run_wide_ffn(_normed(x, norm), None, up, down, activation, scale, x if residual else None)
            return y, (between,) if takes_wide_gradient(x, up, down) else ()
        if epilogue_reason(x, up) is None and epilogue_reason(x, down) is None:
            hidden = linear_epilogue(_normed(x, norm), up, activation)
            return linear_epilogue(hidden, down, "none", x if residual else None, scale), ()
    (first, last, image), normed = _dense_block(x, given), _normed(x, norm)
    y = last(ACTIVATIONS[activation](first(normed)))
    return y.add_(x) if residual else y, (*first, *last, image)


def _back_feed_forward(
    dy: Tensor, x: Tensor, given: FeedForward, kept: Kept, learning: set[int], branch: Branch
) -> tuple[Tensor, FeedForward]:
    assert not isinstance(given.up, Gated), "training_reason says so"
    if len(kept) == 1:  # what lies between two factors of a wide block
        return _back_wide(dy, x, given, kept, learning, branch)
    first, last, image = (AsDense(*kept[:3]), AsDense(*kept[3:6]), kept[6]) if kept else _dense_block(x, given)
    normed = _normed(x, given.norm)
    if image is not None:
        hidden, of_sums, of_bias = run_hidden_gradient(normed, dy, image, first.bias, given.activation)
    else:
        hidden, of_sums = first(normed), dy @ last.weight
        of_bias = activation_gradient(hidden, of_sums, given.activation)
    (up,), _ = _gradients(of_sums, normed, first, (given.up,), None, learning, branch, of_bias)
    (down,), scale = _gradients(dy, hidden, last, (given.down,), given.scale, learning, branch)
    dx, norm = _back_block(dy, x, given, of_sums @ first.weight)
    return dx, given._replace(norm=norm, up=up, down=down, scale=scale)


def _back_wide(dy: Tensor, x: Tensor, given: FeedForward, kept: Kept, learning: set[int], branch: Branch) -> tuple[Tensor, FeedForward]:
    """The same for a block of factors that was multiplied factor by factor."""
    up, down, scale = given.up, given.down, given.scale
    assert isinstance(up, FusedFactors) and isinstance(down, FusedFactors), "the forward pass keeps nothing of others"
    way = wide_gradient(up.architecture, down.architecture, shared_limit_of(x.device.index))
    assert isinstance(way, WideGradient), "takes_wide_gradient says so"
    images = ahead(present(*up.tensors, *down.tensors, scale), partial(way.weights, up, down, scale, x.dtype))
    learns = not learning.isdisjoint(map(id, up.tensors)), not learning.isdisjoint(map(id, present(*down.tensors, scale)))
    parts, of_bias = known_sums(dy), None
    if learns[1]:
        of_bias = branch.run(sum_of_rows, dy if parts is None else parts, torch.float32)
    found = way.run(_normed(x, given.norm), dy, kept[0], images, given.activation, learns, branch)
    if found.up is not None:
        up = branch.run(_as_given, found.up, found.bias, up)
    if found.down is not None:
        down, scale = branch.run(_unscaled, found.down, of_bias, down, scale)
    dx, norm = _back_block(dy, x, given, found.x)
    return dx, given._replace(norm=norm, up=up, down=down, scale=scale)


def _unscaled(
    of_factors: tuple[Tensor, ...], of_bias: Tensor | None, linear: FusedFactors, scale: Tensor | None
) -> tuple[FusedFactors, Tensor | None]:
    """The gradients of a linear and of the scale behind it, from those of the scaled weights, which has the left factor, and bias."""
    assert of_bias is not None, "the sums of dy"
    if scale is None:
        return _as_given(of_factors, of_bias, linear), None
    left, (of_left, *others) = linear.factors[0], of_factors
    of_scale = (of_left * left).sum(2).flatten()
    if linear.bias is not None:
        of_scale = of_scale + linear.bias * of_bias
    return _as_given((of_left * by_output(scale, left), *others), of_bias * scale, linear), of_scale.to(scale.dtype)


def _as_given(of_factors: tuple[Tensor, ...], of_bias: Tensor | None, linear: FusedFactors) -> FusedFactors:
    """The gradients of a linear in the dtypes of its tensors."""
    factors = tuple([gradient.to(factor.dtype) for gradient, factor in zip(of_factors, linear.factors, strict=True)])
    return FusedFactors(factors, None if linear.bias is None or of_bias is None else of_bias.to(linear.bias.dtype))


def _back_block(dy: Tensor, x: Tensor, given: FeedForward, dx: Tensor) -> tuple[Tensor, Norm | None]:
    """The gradients of a block's x and of its norm, for gradients dx of what the norm gives."""
    beside, norm = dy if given.residual else None, given.norm
    if norm is not None:
        return _back_norm(x, dx, norm, beside)
    return dx if beside is None else dx + beside, None


def _dense(group: Sequence[Linear], scale: Tensor | None, dtype: torch.dtype, kept: Kept = (), *, bias: bool = True) -> AsDense:
    """The linears multiplied out: what the forward pass kept of them, or anew, with or without the bias."""
    if kept:
        return AsDense(*kept)
    group = group if bias else [each._replace(bias=None) for each in group]
    return ahead(present(*[tensor for each in group for tensor in each.tensors], scale), lambda: as_dense(group, scale, dtype))


def _dense_block(x: Tensor, given: FeedForward) -> tuple[AsDense, AsDense, Tensor | None]:
    """Both linears multiplied out, and the image of ``hidden_image`` where the kernel takes it."""
    up, down = given.up, given.down
    assert not isinstance(up, Gated), "training_reason says so"

    def make() -> tuple[AsDense, AsDense, Tensor | None]:
        first, last = as_dense((up,), None, x.dtype), as_dense((down,), given.scale, x.dtype)
        return first, last, hidden_image(first.weight, last.weight) if hidden_gradient_takes(x, *last.weight.shape) else None

    return ahead(present(*up.tensors, *down.tensors, given.scale), make)


def _halves(x: Tensor) -> bool:
    """Whether kernels multiply x by factors; packing weights for those of float32 takes too long to be done for each batch."""
    return kernels_take(x) and x.dtype.itemsize == 2


def _normed(x: Tensor, norm: Norm | None) -> Tensor:
    return x if norm is None else normalize_rows(x, *norm)


_FORWARD: dict[type, Callable[..., Any]] = {
    LayerNorm: _layer_norm,
    NormLinears: _norm_linears,
    LinearResidual: _linear_residual,
    FeedForward: _feed_forward,
}
_BACKWARD: dict[type, Callable[..., Any]] = {
    LayerNorm: _back_layer_norm,
    NormLinears: _back_norm_linears,
    LinearResidual: _back_linear_residual,
    FeedForward: _back_feed_forward,
}
