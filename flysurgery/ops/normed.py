"""A layer norm in one launch, and why there may be none."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from flysurgery.errors import BackendError
from flysurgery.ops.cuda.device import device_obstacle
from flysurgery.ops.cuda.layer_norm import layer_norm_obstacle, layer_norm_operator
from flysurgery.ops.decided import decided
from flysurgery.ops.epilogue import common_obstacle, wrong_vector
from flysurgery.ops.parts import Norm
from flysurgery.ops.stage import Stage, Way


class _Operands(NamedTuple):
    norm: Norm


def layer_norm(
    x: Tensor,  # shape: (*batch, features)
    norm: Norm,
) -> Tensor:  # shape: (*batch, features)
    """``norm(x)`` in one launch.

    Raises:
        BackendError: no kernel takes this; the message is what ``layer_norm_way`` answers.
    """
    way = layer_norm_way(x, norm)
    if isinstance(way, str):
        raise BackendError(way)
    return way.run()


def layer_norm_way(x: Tensor, norm: Norm) -> Way | str:
    """How ``layer_norm`` computes this, or why no kernel takes it."""
    stages = decided(lambda: _stages(x, norm), (x, *norm.tensors), "layer_norm", norm.form)
    return stages if isinstance(stages, str) else Way(stages, x, _Operands(norm))


def _stages(x: Tensor, norm: Norm) -> tuple[Stage, ...] | str:
    if x.dim() == 0:
        return "expected rows of features, got a scalar"
    wrong = common_obstacle(x, norm.tensors) or norm_reason(norm, x.shape[-1], x.dtype)
    return wrong or (Stage((), lambda y, x, given: normed(y, given.norm)),)


def normed(
    x: Tensor,  # shape: (*batch, features)
    norm: Norm | None,
) -> Tensor:  # shape: (*batch, features)
    """The norm of x in one launch; x itself where there is none."""
    if norm is None:
        return x
    return layer_norm_operator(x.reshape(-1, x.shape[-1]), norm.weight, norm.bias, norm.eps).view(x.shape)


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
