"""Operators for inference, each one launch of a fused kernel, and the reasons where there is none.

``flysurgery.ops.composed`` has the same functions made of PyTorch's operators, for everything that a reason excludes.
"""

from __future__ import annotations

import torch
from torch import Tensor

import flysurgery.ops.cuda.ffn_operator  # noqa: F401 - registers it
from flysurgery.errors import BackendError
from flysurgery.factors import architecture_of
from flysurgery.ops.cuda.backend import is_exporting
from flysurgery.ops.cuda.ffn import ffn_obstacle
from flysurgery.ops.parts import FusedFactors, Norm
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
    y = torch.ops.flysurgery.ffn(
        rows, *norm_parts, list(up.factors), up.bias, list(down.factors), down.bias, activation, scale, residual
    )
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


def _wrong_size(
    x: Tensor, norm: Norm | None, layers: tuple[tuple[Architecture, Tensor | None], ...], scale: Tensor | None
) -> str | None:
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


def _shapes(linear: FusedFactors) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(factor.shape) for factor in linear.factors)
