"""The inference operators composed of PyTorch's own: what they mean, on any device, in any dtype, with gradients.

The fused kernels round less often: they keep sums, norms and activations in float32 between the products.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from flysurgery.errors import BackendError
from flysurgery.ops.multiply import ks_linear
from flysurgery.ops.parts import Dense, Gated, Linear, Norm

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": functional.gelu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
    "silu": functional.silu,
}


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

    Where ``up`` is gated, ``activation(gate) * value`` takes the place of the activation.
    """
    hidden = _hidden(_normed(x, norm), up, _activation(activation))
    y = _scaled(_linear(_normed(hidden, inner), down), scale)
    return x + y if residual else y


def norm_linear(
    x: Tensor,  # shape: (*batch, in_features)
    norm: Norm,
    group: Sequence[Linear],
) -> Tensor:  # shape: (*batch, sum of all out_features)
    """The linears' outputs for ``norm(x)``, side by side."""
    normed = _normed(x, norm)
    outputs = [_linear(normed, member) for member in group]
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)


def layer_norm(
    x: Tensor,  # shape: (*batch, features)
    norm: Norm,
) -> Tensor:  # shape: (*batch, features)
    """``norm(x)``."""
    return _normed(x, norm)


def attention(
    q: Tensor,  # shape: (batch, heads, queries, head)
    k: Tensor,  # shape: (batch, heads, keys, head)
    v: Tensor,  # shape: (batch, heads, keys, head)
    scale: float | None = None,
) -> Tensor:  # shape: (batch, heads, queries, head)
    """``softmax(scale * q @ k.mT) @ v``; ``scale`` None stands for one over the root of a head's features."""
    return functional.scaled_dot_product_attention(q, k, v, scale=scale)


def linear_residual(
    x: Tensor,  # shape: (*batch, in_features)
    linear: Linear,
    residual: Tensor,  # shape: (*batch, out_features)
    scale: Tensor | None = None,  # shape: (out_features,)
) -> Tensor:  # shape: (*batch, out_features)
    """``residual + scale * linear(x)``."""
    return residual + _scaled(_linear(x, linear), scale)


def patch_embedding(
    images: Tensor,  # shape: (images, channels, height, width)
    weight: Tensor,  # shape: (features, channels, patch height, patch width)
    bias: Tensor | None,  # shape: (features,)
    position: Tensor | None = None,  # shape: (*, patches, features), or (*, tokens + patches, features)
    prefix: Sequence[Tensor] = (),  # shapes: (*, some of the tokens, features)
) -> Tensor:  # shape: (images, tokens + patches, features)
    """A convolution of patches that do not overlap, the tokens of ``prefix`` put before each image's; ``position`` is added to the
    patches, or to both where it has rows for both."""
    patches = functional.conv2d(images, weight, bias, stride=weight.shape[2:]).flatten(2).transpose(1, 2)
    if position is not None and position.shape[-2] == patches.shape[1]:
        patches, position = patches + position, None
    tokens = torch.cat([*(each.expand(len(images), -1, -1) for each in prefix), patches], dim=1) if prefix else patches
    return tokens if position is None else tokens + position


def _activation(name: str) -> Callable[[Tensor], Tensor]:
    if name not in ACTIVATIONS:
        raise BackendError(f"expected an activation out of {', '.join(ACTIVATIONS)}, got '{name}'")
    return ACTIVATIONS[name]


def _hidden(x: Tensor, up: Linear | Gated, activation: Callable[[Tensor], Tensor]) -> Tensor:
    if not isinstance(up, Gated):
        return activation(_linear(x, up))
    parts = [_linear(x, member) for member in up.members]
    parts = parts if len(parts) == 2 else parts[0].chunk(2, dim=-1)
    return activation(parts[up.gate]) * parts[1 - up.gate]


def _normed(x: Tensor, norm: Norm | None) -> Tensor:
    return x if norm is None else functional.layer_norm(x, x.shape[-1:], norm.weight, norm.bias, norm.eps)


def _linear(x: Tensor, linear: Linear) -> Tensor:
    if isinstance(linear, Dense):
        return functional.linear(x, linear.weight.flatten(1), linear.bias)
    return ks_linear(x, linear.factors, linear.bias)


def _scaled(y: Tensor, scale: Tensor | None) -> Tensor:
    return y if scale is None else y * scale
