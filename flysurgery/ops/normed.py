"""A layer norm in one launch, and why there may be none."""

from __future__ import annotations

import torch
from torch import Tensor

from flysurgery.ops.cuda.device import device_obstacle
from flysurgery.ops.cuda.layer_norm import layer_norm_obstacle
from flysurgery.ops.epilogue import wrong_vector
from flysurgery.ops.parts import Norm


def normed(
    x: Tensor,  # shape: (*batch, features)
    norm: Norm | None,
) -> Tensor:  # shape: (*batch, features)
    """The norm of x in one launch; x itself where there is none."""
    if norm is None:
        return x
    return torch.ops.flysurgery.layer_norm(x.reshape(-1, x.shape[-1]), norm.weight, norm.bias, norm.eps).view(x.shape)


def norm_reason(norm: Norm | None, features: int, dtype: torch.dtype) -> str | None:
    """Why no kernel takes a norm of so many features; None where one does, or there is no norm."""
    return None if norm is None else wrong_norm(norm, features) or _layer_norm_obstacle(features, dtype)


def wrong_norm(norm: Norm | None, features: int) -> str | None:
    """Why a norm's weight or bias do not fit so many features."""
    if norm is None:
        return None
    return wrong_vector(norm.weight, features, "norm weight") or wrong_vector(norm.bias, features, "norm bias")


@torch.compiler.assume_constant_result  # depends on the machine and the arguments alone
def _layer_norm_obstacle(features: int, dtype: torch.dtype) -> str | None:
    return device_obstacle() or layer_norm_obstacle(features, dtype)
