"""Operators for inference, by fused kernels, and the reasons where there is none.

``flysurgery.ops.composed`` has the same functions made of PyTorch's operators, for everything that a reason excludes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

import flysurgery.ops.cuda.ffn_operator  # noqa: F401 - registers it
from flysurgery.errors import BackendError
from flysurgery.factors import architecture_of
from flysurgery.ops.cuda.device import device_obstacle
from flysurgery.ops.cuda.ffn import ffn_obstacle
from flysurgery.ops.cuda.layer_norm import layer_norm_obstacle
from flysurgery.ops.cuda.linear_residual import linear_residual_obstacle
from flysurgery.ops.cuda.modes import mode_of, tf32_allowed
from flysurgery.ops.group import ks_linear_group
from flysurgery.ops.multiply import ks_linear
from flysurgery.ops.parts import FusedFactors, Norm
from flysurgery.ops.problem import is_exporting
from flysurgery.patterns import Architecture


def ffn(
    x: Tensor,  # shape: (*batch, in_features)
    norm: Norm | None,
    up: FusedFactors,
    down: FusedFactors,
    activation: str = "gelu",
    scale: Tensor | None = None,  # shape: (out_features,)
    residual: bool = True,
) -> Tensor:  # shape: (*batch, out_features)
    """``x + scale * down(activation(up(norm(x))))`` in one launch, without ``x +`` where ``residual`` is false.

    Intermediates are rounded to the dtype of x where they enter a product; norm, sums, activation and residual are
    float32. Weights may be wider than x; they are rounded when they are packed, once for each version.

    Raises:
        BackendError: no kernel takes this; the message is what ``ffn_reason`` answers.
    """
    obstacle = ffn_reason(x, norm, up, down, activation, scale, residual)
    if obstacle is not None:
        raise BackendError(obstacle)
    norm_parts = (None, None, None) if norm is None else (norm.weight, norm.bias, norm.eps)
    rows = x.reshape(-1, x.shape[-1])
    y = torch.ops.flysurgery.ffn(rows, *norm_parts, list(up.factors), up.bias, list(down.factors), down.bias, activation, scale, residual)
    return y.view(*x.shape[:-1], y.shape[-1])


def ffn_reason(
    x: Tensor,
    norm: Norm | None,
    up: FusedFactors,
    down: FusedFactors,
    activation: str = "gelu",
    scale: Tensor | None = None,
    residual: bool = True,
) -> str | None:
    """Why no kernel takes this feed-forward block; None where one does. Looks at shapes, dtypes, devices and gradients only."""
    parts = (*up.factors, *down.factors, up.bias, down.bias, scale, *((norm.weight, norm.bias) if norm is not None else ()))
    tensors = tuple(part for part in parts if part is not None)
    obstacle = _common_obstacle(x, tensors)
    if obstacle is not None:
        return obstacle
    first, second = architecture_of(up.factors), architecture_of(down.factors)
    wrong = _wrong_size(x, norm, ((first, up.bias), (second, down.bias)), scale)
    return wrong or _ffn_obstacle(_shapes(up), _shapes(down), x.dtype, activation, residual, x.device.index)


def norm_linear(
    x: Tensor,  # shape: (*batch, in_features)
    norm: Norm,
    group: Sequence[FusedFactors],
) -> Tensor:  # shape: (*batch, sum of all out_features)
    """The linears' outputs for ``norm(x)``, side by side: one launch for the norm, and one for linears of one architecture.

    Raises:
        BackendError: no kernel takes this; the message is what ``norm_linear_reason`` answers.
    """
    obstacle = norm_linear_reason(x, norm, group)
    if obstacle is not None:
        raise BackendError(obstacle)
    normed = torch.ops.flysurgery.layer_norm(x.reshape(-1, x.shape[-1]), norm.weight, norm.bias, norm.eps).view(x.shape)
    if len(group) == 1:
        return ks_linear(normed, group[0].factors, group[0].bias)
    return ks_linear_group(normed, [member.factors for member in group], [member.bias for member in group])


def norm_linear_reason(x: Tensor, norm: Norm, group: Sequence[FusedFactors]) -> str | None:
    """Why no kernel takes this norm; None where one does. The linears are multiplied by the backend that ``ks_linear`` chooses."""
    parts = (norm.weight, norm.bias, *(part for member in group for part in (*member.factors, member.bias)))
    obstacle = _common_obstacle(x, tuple(part for part in parts if part is not None))
    if obstacle is not None:
        return obstacle
    layers = [(architecture_of(member.factors), member.bias) for member in group]
    wrong = next(filter(None, (_wrong_size(x, norm, (layer,), None) for layer in layers)), None)
    return wrong or _layer_norm_obstacle(x.shape[-1], x.dtype)


def linear_residual(
    x: Tensor,  # shape: (*batch, in_features)
    linear: FusedFactors,
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
    mode = mode_of(x.dtype, allow_tf32=tf32_allowed())
    rows = residual.reshape(-1, residual.shape[-1])
    y = torch.ops.flysurgery.linear_residual(x.reshape(-1, x.shape[-1]), list(linear.factors), linear.bias, rows, scale, mode)
    return y.view(residual.shape)


def linear_residual_reason(x: Tensor, linear: FusedFactors, residual: Tensor, scale: Tensor | None = None) -> str | None:
    """Why no kernel takes this; None where one does."""
    obstacle = _common_obstacle(x, tuple(part for part in (*linear.factors, linear.bias, residual, scale) if part is not None))
    if obstacle is not None:
        return obstacle
    architecture = architecture_of(linear.factors)
    wrong = _wrong_size(x, None, ((architecture, linear.bias),), scale)
    if wrong is not None:
        return wrong
    expected = (*x.shape[:-1], architecture.out_features)
    if residual.shape != expected or residual.dtype != x.dtype:
        return f"expected a residual of shape {expected} and {x.dtype}, got {tuple(residual.shape)} and {residual.dtype}"
    mode = mode_of(x.dtype, allow_tf32=tf32_allowed())
    if mode is None:
        return f"the fused operators take float32, float16 and bfloat16, not {x.dtype}"
    return _linear_residual_obstacle(_shapes(linear), mode, scale is not None, x.device.index)


def patch_embedding(
    images: Tensor,  # shape: (images, channels, height, width)
    weight: Tensor,  # shape: (features, channels, patch height, patch width)
    bias: Tensor | None,  # shape: (features,)
    position: Tensor | None = None,  # shape: (patches, features)
    prefix: Tensor | None = None,  # shape: (tokens, features)
) -> Tensor:  # shape: (images, tokens + patches, features)
    """A convolution of patches that do not overlap, as one copy of the pixels and one matrix product into the result.

    ``position`` is added to the patches, the rows of ``prefix`` stand before those of each image. An eighth of the time
    of cuDNN's convolution, addition and concatenation on an H200, ViT-S/16 in half precision.

    Raises:
        BackendError: this is no such convolution; the message is what ``patch_embedding_reason`` answers.
    """
    obstacle = patch_embedding_reason(images, weight, bias, position, prefix)
    if obstacle is not None:
        raise BackendError(obstacle)
    features, channels, high, wide = weight.shape
    count, _, height, width = images.shape
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
    obstacle = _common_obstacle(images, tensors)
    if obstacle is not None:
        return obstacle
    if images.dim() != 4 or weight.dim() != 4 or images.shape[1] != weight.shape[1]:
        return f"expected images and a convolution of as many channels, got shapes {tuple(images.shape)} and {tuple(weight.shape)}"
    if images.shape[2] % weight.shape[2] or images.shape[3] % weight.shape[3]:
        return f"images of {images.shape[2]}x{images.shape[3]} are not cut into patches of {weight.shape[2]}x{weight.shape[3]}"
    wrong = next((tensor for tensor in tensors if tensor.dtype != images.dtype), None)
    return None if wrong is None else f"expected all tensors in the images' {images.dtype}, got {wrong.dtype}"


def _common_obstacle(x: Tensor, tensors: tuple[Tensor, ...]) -> str | None:
    if x.device.type != "cuda":
        return f"the fused operators need tensors on a CUDA device, x is on {x.device.type}"
    if any(tensor.device != x.device for tensor in tensors):
        return f"the fused operators need all tensors on {x.device}, where x is"
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (x, *tensors)):
        return "the fused operators have no gradients; call them under torch.inference_mode() or torch.no_grad()"
    if is_exporting():
        return "an exported graph holds only PyTorch's own operators"
    return None


def _wrong_size(x: Tensor, norm: Norm | None, layers: tuple[tuple[Architecture, Tensor | None], ...], scale: Tensor | None) -> str | None:
    inputs, outputs = layers[0][0].in_features, layers[-1][0].out_features
    if x.dim() == 0 or x.shape[-1] != inputs:
        return f"factors {layers[0][0]} take {inputs} features, got x of shape {tuple(x.shape)}"
    expected = [(bias, architecture.out_features, "bias") for architecture, bias in layers] + [(scale, outputs, "scale")]
    if norm is not None:
        expected += [(norm.weight, inputs, "norm weight"), (norm.bias, inputs, "norm bias")]
    for tensor, size, name in expected:
        if tensor is not None and tuple(tensor.shape) != (size,):
            return f"expected a {name} of shape ({size},), got {tuple(tensor.shape)}"
    return None


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
def _layer_norm_obstacle(features: int, dtype: torch.dtype) -> str | None:
    return device_obstacle() or layer_norm_obstacle(features, dtype)


@torch.compiler.assume_constant_result
def _linear_residual_obstacle(shapes: tuple[tuple[int, ...], ...], mode: str, scaled: bool, device_index: int) -> str | None:
    return device_obstacle(device_index) or linear_residual_obstacle(Architecture.of(*shapes), mode, scaled, device_index)


def _shapes(linear: FusedFactors) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(factor.shape) for factor in linear.factors)
