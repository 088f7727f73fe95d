"""Operators for inference, by fused kernels, and the reasons where there is none.

``flysurgery.ops.composed`` has the same functions made of PyTorch's operators, for everything that a reason excludes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import linear as torch_linear

import flysurgery.ops.cuda.ffn_operator  # noqa: F401 - registers it
from flysurgery.errors import BackendError
from flysurgery.ops.cuda.attention import attention_obstacle
from flysurgery.ops.cuda.dense import dense_advice, patches_obstacle
from flysurgery.ops.cuda.device import device_obstacle
from flysurgery.ops.cuda.few_attention import few_attention_obstacle
from flysurgery.ops.cuda.ffn import ffn_obstacle
from flysurgery.ops.cuda.modes import mode_of, tf32_allowed
from flysurgery.ops.cuda.norm_linear import norm_linear_obstacle
from flysurgery.ops.epilogue import common_obstacle, epilogue_reason, linear_epilogue, wrong_size, wrong_vector
from flysurgery.ops.few_rows import few_rows_linear, takes_few_rows
from flysurgery.ops.gated import gated_hidden, gated_launches, gated_reason, multiplied
from flysurgery.ops.group import ks_linear_group
from flysurgery.ops.multiply import ks_linear
from flysurgery.ops.normed import norm_reason, normed, wrong_norm
from flysurgery.ops.parts import Dense, FusedFactors, Gated, Linear, Norm
from flysurgery.ops.wide import takes_ffn, takes_group, wide_ffn, wide_ffn_launches, wide_group, wide_group_launches
from flysurgery.patterns import Architecture


def ffn(
    x: Tensor,  # shape: (*batch, in_features)
    norm: Norm | None,
    up: Linear | Gated,
    down: Linear,
    activation: str = "gelu",
    scale: Tensor | None = None,  # shape: (out_features,)
    residual: bool = True,
    inner: Norm | None = None,
) -> Tensor:  # shape: (*batch, out_features)
    """``x + scale * down(inner(activation(up(norm(x)))))``, without ``x +`` where ``residual`` is false.

    Where ``up`` is gated, ``activation(gate) * value`` takes the place of the activation. One launch where a kernel takes the whole
    block, two for few rows; else one for the norm and what stands behind it with the activation, or one for each, and one for the last
    layer with scale and residual, behind one for a norm before it; or, of wide layers and many rows, one for each factor and one for the
    norm's moments.
    Intermediates are rounded to the dtype of x where they enter a product or are stored; norm, sums, activation and residual are
    float32. Weights may be wider than x; they are rounded when they are packed, once for each version.

    Raises:
        BackendError: no kernel takes this; the message is what ``ffn_reason`` answers.
    """
    obstacle = ffn_reason(x, norm, up, down, activation, scale, residual, inner)
    if obstacle is not None:
        raise BackendError(obstacle)
    if isinstance(up, FusedFactors | Dense) and _few_rows_twice(x, norm, up, down, activation, inner):
        hidden = few_rows_linear(x, norm, (up,), activation)
        return few_rows_linear(hidden, inner, (down,), residual=x if residual else None, scale=scale)
    if (
        isinstance(up, FusedFactors)
        and isinstance(down, FusedFactors)
        and _whole_obstacle(x, up, down, activation, residual, inner) is None
    ):
        parts = (None, None, None) if norm is None else (norm.weight, norm.bias, norm.eps)
        rows = x.reshape(-1, x.shape[-1])
        y = torch.ops.flysurgery.ffn(rows, *parts, list(up.factors), up.bias, list(down.factors), down.bias, activation, scale, residual)
        return y.view(*x.shape[:-1], y.shape[-1])
    if isinstance(up, FusedFactors) and isinstance(down, FusedFactors) and inner is None and takes_ffn(x, up, down, activation):
        return wide_ffn(x, norm, up, down, activation, scale, residual)
    hidden = gated_hidden(x, norm, up, activation) if isinstance(up, Gated) else _activated(x, norm, up, activation)
    return _added(normed(hidden, inner), down, x if residual else None, scale)


def _activated(x: Tensor, norm: Norm | None, up: Linear, activation: str) -> Tensor:
    """``activation(up(norm(x)))``, in one launch where the fused kernel takes the norm as well."""
    if norm is not None and isinstance(up, FusedFactors) and _in_one_launch(x, [up]):
        return _fused_norm_linear(x, norm, [up], activation)
    return linear_epilogue(normed(x, norm), up, activation)


def _added(hidden: Tensor, down: Linear, residual: Tensor | None, scale: Tensor | None) -> Tensor:
    """``residual + scale * down(hidden)``, in one launch where there is a kernel for it."""
    if takes_few_rows(hidden, (down,)):
        return few_rows_linear(hidden, None, (down,), residual=residual, scale=scale)
    if _added_in_one_launch(hidden, down):
        return linear_epilogue(hidden, down, residual=residual, scale=scale)
    y = multiplied(hidden, down)
    if scale is None:
        return y if residual is None else residual + y
    scale = scale.to(y.dtype)
    return y * scale if residual is None else torch.addcmul(residual, y, scale)


def _added_in_one_launch(x: Tensor, down: Linear) -> bool:
    """Whether a kernel multiplies and adds to the residual, and is the fastest."""
    if epilogue_reason(down, x.dtype, x.device) is not None:
        return False
    mode = mode_of(x.dtype, allow_tf32=tf32_allowed())
    return not isinstance(down, Dense) or _dense_advice(*down.sizes, mode or "", x.device.index) is None


def ffn_launches(
    x: Tensor,
    norm: Norm | None,
    up: Linear | Gated,
    down: Linear,
    activation: str = "gelu",
    scale: Tensor | None = None,
    residual: bool = True,
    inner: Norm | None = None,
) -> tuple[str, ...]:
    """What the launches of ``ffn`` compute, one after the other, where ``ffn_reason`` has none against it."""
    added = " and ".join([*(["scale"] if scale is not None else []), *(["residual"] if residual else [])])
    last = f"down and {added}" if added else "down"
    if isinstance(up, Gated):
        first = gated_launches(x, norm, up, activation)
    elif _few_rows_twice(x, norm, up, down, activation, inner):
        return ("up and activation" if norm is None else "norm, up and activation", last if inner is None else f"inner norm, {last}")
    elif (
        isinstance(down, FusedFactors)
        and isinstance(up, FusedFactors)
        and _whole_obstacle(x, up, down, activation, residual, inner) is None
    ):
        return ("the whole block",)
    elif isinstance(up, FusedFactors) and isinstance(down, FusedFactors) and inner is None and takes_ffn(x, up, down, activation):
        return wide_ffn_launches(norm, scale, residual)
    elif norm is not None and isinstance(up, FusedFactors) and _in_one_launch(x, [up]):
        first = ("norm, up and activation",)
    else:
        first = (*(() if norm is None else ("norm",)), "up and activation")
    before = () if inner is None else ("inner norm",)
    if takes_few_rows(x, (down,)) or _added_in_one_launch(x, down):
        return (*first, *before, last)
    return (*first, *before, "down", *([added] if added else []))


def ffn_reason(
    x: Tensor,
    norm: Norm | None,
    up: Linear | Gated,
    down: Linear,
    activation: str = "gelu",
    scale: Tensor | None = None,
    residual: bool = True,
    inner: Norm | None = None,
) -> str | None:
    """Why no kernel takes this feed-forward block; None where one does. Looks at shapes, dtypes, devices and gradients only."""
    norms = [each for each in (norm, inner) if each is not None]
    tensors = (*up.tensors, *down.tensors, *(part for each in norms for part in each.tensors), *(() if scale is None else (scale,)))
    (inputs, hidden), (taken, outputs) = up.sizes, down.sizes
    wrong = common_obstacle(x, tensors) or wrong_vector(down.bias, outputs, "bias")
    wrong = wrong or next(filter(None, (wrong_size(x, each) for each in (up.members if isinstance(up, Gated) else (up,)))), None)
    wrong = wrong or wrong_vector(scale, outputs, "scale") or wrong_norm(norm, inputs) or wrong_norm(inner, hidden)
    if wrong is not None:
        return wrong
    if hidden != taken or (residual and inputs != outputs):
        return f"expected layers that fit each other and the residual, got {inputs} to {hidden} and {taken} to {outputs} features"
    norms_reason = norm_reason(norm, inputs, x.dtype) or norm_reason(inner, hidden, x.dtype)
    if isinstance(up, Gated):
        return norms_reason or gated_reason(x, up, activation)
    whole = _whole_obstacle(x, up, down, activation, residual, inner)
    if whole is None or _few_rows_twice(x, norm, up, down, activation, inner):
        return None
    if isinstance(up, FusedFactors) and isinstance(down, FusedFactors) and inner is None and takes_ffn(x, up, down, activation):
        return norms_reason
    launches = norms_reason or epilogue_reason(up, x.dtype, x.device, activation)
    return None if launches is None else f"{whole}; {launches}"


def norm_linear(
    x: Tensor,  # shape: (*batch, in_features)
    norm: Norm,
    group: Sequence[Linear],
) -> Tensor:  # shape: (*batch, sum of all out_features)
    """The linears' outputs for ``norm(x)``, side by side.

    One launch for few rows and where the fused kernel takes the linears with their norm; else one for the norm, and one for linears of
    one architecture; or, of wide layers and many rows, one for each factor and one for the norm's moments. A dense one is multiplied by
    PyTorch, but in float32 on tensor cores, by pairs of fp16.

    Raises:
        BackendError: no kernel takes this; the message is what ``norm_linear_reason`` answers.
    """
    obstacle = norm_linear_reason(x, norm, group)
    if obstacle is not None:
        raise BackendError(obstacle)
    if takes_few_rows(x, group, norm):
        return few_rows_linear(x, norm, group)
    factors = [member for member in group if isinstance(member, FusedFactors)]
    if _alike(factors) and takes_group(x, factors):
        return wide_group(x, norm, factors)
    if _in_one_launch(x, factors):
        return _fused_norm_linear(x, norm, factors, "none")
    entering = normed(x, norm)
    if len(group) == 1 and isinstance(group[0], Dense):
        dense = group[0]
        return linear_epilogue(entering, dense) if _by_pairs(x, dense) else torch_linear(entering, dense.weight, dense.bias)
    if len(factors) == 1:
        return ks_linear(entering, factors[0].factors, factors[0].bias)
    return ks_linear_group(entering, [member.factors for member in factors], [member.bias for member in factors])


def _in_one_launch(x: Tensor, group: Sequence[FusedFactors]) -> bool:
    """Whether the fused kernel takes the linears with their norm."""
    mode = mode_of(x.dtype, allow_tf32=tf32_allowed())
    return _alike(group) and mode is not None and _norm_linear_obstacle(_shapes(group[0]), mode, len(group), x.device.index) is None


def _alike(group: Sequence[FusedFactors]) -> bool:
    """Whether linears are of one architecture, with a bias each or none."""
    if not group:
        return False
    shapes, biased = _shapes(group[0]), group[0].bias is not None
    return all(_shapes(member) == shapes and (member.bias is not None) == biased for member in group)


def _fused_norm_linear(x: Tensor, norm: Norm, group: Sequence[FusedFactors], activation: str) -> Tensor:
    rows, mode = x.reshape(-1, x.shape[-1]), mode_of(x.dtype, allow_tf32=tf32_allowed())
    factors, biases = [factor for member in group for factor in member.factors], [m.bias for m in group if m.bias is not None]
    y = torch.ops.flysurgery.norm_linear(rows, norm.weight, norm.bias, norm.eps, factors, biases, len(group), activation, mode)
    return y.view(*x.shape[:-1], y.shape[-1])


def norm_linear_launches(x: Tensor, norm: Norm, group: Sequence[Linear]) -> tuple[str, ...]:
    """What the launches of ``norm_linear`` compute, one after the other, where ``norm_linear_reason`` has none against it."""
    if takes_few_rows(x, group, norm):
        return ("norm and linear",)
    factors = [member for member in group if isinstance(member, FusedFactors)]
    if _alike(factors) and takes_group(x, factors):
        return wide_group_launches()
    return ("norm and linear",) if _in_one_launch(x, factors) else ("norm", "linear")


def norm_linear_reason(x: Tensor, norm: Norm, group: Sequence[Linear]) -> str | None:
    """Why no kernel takes this norm; None where one does. Factors are multiplied by the backend that ``ks_linear`` chooses."""
    wrong = common_obstacle(x, (*norm.tensors, *(part for member in group for part in member.tensors)))
    wrong = wrong or next(filter(None, (wrong_size(x, member) for member in group)), None) or wrong_norm(norm, x.shape[-1])
    if wrong is not None or takes_few_rows(x, group, norm):
        return wrong
    if len(group) > 1 and any(isinstance(member, Dense) for member in group):
        return "several linears that share x are multiplied together where all of them are factors"
    return norm_reason(norm, x.shape[-1], x.dtype)


def attention(
    q: Tensor,  # shape: (batch, heads, queries, head)
    k: Tensor,  # shape: (batch, heads, keys, head)
    v: Tensor,  # shape: (batch, heads, keys, head)
    scale: float | None = None,
) -> Tensor:  # shape: (batch, heads, queries, head)
    """``softmax(scale * q @ k.mT) @ v`` on tensor cores; ``scale`` None stands for one over the root of a head's features.

    Of float32 by pairs of fp16, or in TF32 grade where PyTorch's settings allow that; of halves for few queries. The result's tokens
    lie before its heads in memory.

    Raises:
        BackendError: no kernel takes this; the message is what ``attention_reason`` answers.
    """
    obstacle = attention_reason(q, k, v)
    if obstacle is not None:
        raise BackendError(obstacle)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if q.dtype != torch.float32:
        return torch.ops.flysurgery.few_attention(q, k, v, scale)
    return torch.ops.flysurgery.attention(q, k, v, scale, mode_of(q.dtype, allow_tf32=tf32_allowed()))


def attention_reason(q: Tensor, k: Tensor, v: Tensor) -> str | None:
    """Why no kernel takes this attention; None where one does."""
    wrong = common_obstacle(q, (k, v))
    if wrong is not None:
        return wrong
    if q.dim() != 4 or k.shape != (*q.shape[:2], k.shape[-2], q.shape[-1]) or k.shape != v.shape or not q.dtype == k.dtype == v.dtype:
        kinds = ", ".join(f"{tuple(part.shape)} of {part.dtype}" for part in (q, k, v))
        return f"expected q, k and v of shapes (batch, heads, tokens, features) that fit each other, and one dtype, got {kinds}"
    if k.shape[2] == 0:
        return "there are no keys"
    if q.dtype == torch.float32:
        return _attention_obstacle(q.shape[-1], str(mode_of(q.dtype, allow_tf32=tf32_allowed())), q.device.index)
    sizes = q.shape[0] * q.shape[1], q.shape[2], k.shape[2], q.shape[3]
    return few_attention_obstacle(*sizes, q.dtype) or _device_obstacle(q.device.index)


def linear_residual(
    x: Tensor,  # shape: (*batch, in_features)
    linear: Linear,
    residual: Tensor,  # shape: (*batch, out_features)
    scale: Tensor | None = None,  # shape: (out_features,)
) -> Tensor:  # shape: (*batch, out_features)
    """``residual + scale * linear(x)`` in one launch.

    Raises:
        BackendError: no kernel takes this; the message is what ``linear_residual_reason`` answers.
    """
    obstacle = linear_residual_reason(x, linear, residual, scale)
    if obstacle is not None:
        raise BackendError(obstacle)
    if takes_few_rows(x, (linear,)):
        return few_rows_linear(x, None, (linear,), residual=residual, scale=scale)
    return linear_epilogue(x, linear, residual=residual, scale=scale)


def linear_residual_reason(x: Tensor, linear: Linear, residual: Tensor, scale: Tensor | None = None) -> str | None:
    """Why no kernel takes this; None where one does."""
    outputs = linear.sizes[1]
    wrong = common_obstacle(x, (*linear.tensors, residual, *(() if scale is None else (scale,))))
    wrong = wrong or wrong_size(x, linear) or wrong_vector(scale, outputs, "scale")
    if wrong is not None:
        return wrong
    expected = (*x.shape[:-1], outputs)
    if residual.shape != expected or residual.dtype != x.dtype:
        return f"expected a residual of shape {expected} and {x.dtype}, got {tuple(residual.shape)} and {residual.dtype}"
    return None if takes_few_rows(x, (linear,)) else epilogue_reason(linear, x.dtype, x.device)


def patch_embedding(
    images: Tensor,  # shape: (images, channels, height, width)
    weight: Tensor,  # shape: (features, channels, patch height, patch width)
    bias: Tensor | None,  # shape: (features,)
    position: Tensor | None = None,  # shape: (patches, features)
    prefix: Tensor | None = None,  # shape: (tokens, features)
) -> Tensor:  # shape: (images, tokens + patches, features)
    """A convolution of patches that do not overlap, as one matrix product that reads the pixels where they lie.

    ``position`` is added to the patches, the rows of ``prefix`` stand before those of each image; with one of these, or patches
    that the kernel does not read, it is one copy of the pixels and PyTorch's product.

    Raises:
        BackendError: this is no such convolution; the message is what ``patch_embedding_reason`` answers.
    """
    obstacle = patch_embedding_reason(images, weight, bias, position, prefix)
    if obstacle is not None:
        raise BackendError(obstacle)
    features, channels, high, wide = weight.shape
    count, _, height, width = images.shape
    mode = mode_of(images.dtype, allow_tf32=tf32_allowed())
    alone = position is None and prefix is None
    if alone and mode is not None and _patches_obstacle(features, channels, high, wide, mode, images.device.index) is None:
        return torch.ops.flysurgery.dense_patches(images, weight, bias, mode).view(count, -1, features)
    pixels = images.reshape(count, channels, height // high, high, width // wide, wide).permute(0, 2, 4, 1, 3, 5)
    pixels = pixels.reshape(count, -1, channels * high * wide)
    offset = torch.zeros((1, features), dtype=images.dtype, device=images.device) if bias is None else bias[None]
    offset = (offset if position is None else position + offset).expand(count, pixels.shape[1], -1)
    matrix = weight.reshape(features, -1).t().expand(count, -1, -1)
    if prefix is None:
        return torch.baddbmm(offset, pixels, matrix)
    tokens = images.new_empty((count, len(prefix) + pixels.shape[1], features))
    tokens[:, : len(prefix)] = prefix
    torch.baddbmm(offset, pixels, matrix, out=tokens[:, len(prefix) :])
    return tokens


def patch_embedding_reason(
    images: Tensor, weight: Tensor, bias: Tensor | None, position: Tensor | None = None, prefix: Tensor | None = None
) -> str | None:
    """Why ``patch_embedding`` does not take this; None where it does."""
    tensors = tuple(part for part in (weight, bias, position, prefix) if part is not None)
    obstacle = common_obstacle(images, tensors)
    if obstacle is not None:
        return obstacle
    if images.dim() != 4 or weight.dim() != 4 or images.shape[1] != weight.shape[1]:
        return f"expected images and a convolution of as many channels, got shapes {tuple(images.shape)} and {tuple(weight.shape)}"
    if images.shape[2] % weight.shape[2] or images.shape[3] % weight.shape[3]:
        return f"images of {images.shape[2]}x{images.shape[3]} are not cut into patches of {weight.shape[2]}x{weight.shape[3]}"
    wrong = next((tensor for tensor in tensors if tensor.dtype != images.dtype), None)
    return None if wrong is None else f"expected all tensors in the images' {images.dtype}, got {wrong.dtype}"


def _by_pairs(x: Tensor, dense: Dense) -> bool:
    """Whether a dense product without an epilogue is float32, and a kernel makes it on tensor cores."""
    return x.dtype == torch.float32 and not tf32_allowed() and epilogue_reason(dense, x.dtype, x.device) is None


def _few_rows_twice(x: Tensor, norm: Norm | None, up: Linear, down: Linear, activation: str, inner: Norm | None) -> bool:
    """Whether x has few rows, and their kernel takes both layers of a feed-forward block."""
    return takes_few_rows(x, (up,), norm, activation) and takes_few_rows(x, (down,), inner)


def _whole_obstacle(x: Tensor, up: Linear, down: Linear, activation: str, residual: bool, inner: Norm | None) -> str | None:
    """Why no kernel takes the whole block in one launch."""
    if inner is not None:
        return "the kernel of a whole block has no norm between its layers"
    if isinstance(up, Dense) or isinstance(down, Dense):
        return "the kernel of a whole block multiplies factors, and one of its layers is dense"
    return _ffn_obstacle(_shapes(up), _shapes(down), x.dtype, activation, residual, x.device.index)


@torch.compiler.assume_constant_result  # depends on the machine and the arguments alone
def _ffn_obstacle(
    up: tuple[tuple[int, ...], ...],
    down: tuple[tuple[int, ...], ...],
    dtype: torch.dtype,
    activation: str,
    residual: bool,
    device_index: int,
) -> str | None:
    return ffn_obstacle(Architecture.of(*up), Architecture.of(*down), dtype, activation, residual, device_index)


@torch.compiler.assume_constant_result
def _dense_advice(inputs: int, outputs: int, mode: str, device_index: int) -> str | None:
    return dense_advice(inputs, outputs, mode, device_index)


@torch.compiler.assume_constant_result
def _device_obstacle(device_index: int) -> str | None:
    return device_obstacle(device_index)


@torch.compiler.assume_constant_result
def _attention_obstacle(head: int, mode: str, device_index: int) -> str | None:
    return device_obstacle(device_index) or attention_obstacle(head, mode)


@torch.compiler.assume_constant_result
def _patches_obstacle(features: int, channels: int, high: int, wide: int, mode: str, device_index: int) -> str | None:
    return device_obstacle(device_index) or patches_obstacle(high, wide, channels, features, mode, device_index)


@torch.compiler.assume_constant_result
def _norm_linear_obstacle(shapes: tuple[tuple[int, ...], ...], mode: str, linears: int, device_index: int) -> str | None:
    return device_obstacle(device_index) or norm_linear_obstacle(Architecture.of(*shapes), mode, linears, device_index)


def _shapes(linear: FusedFactors) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(factor.shape) for factor in linear.factors)
