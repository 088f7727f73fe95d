"""The fused operators, and what modules give to them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from flysurgery import ops
from flysurgery.layers import ButterflyLinear, SplitLinear
from flysurgery.ops.parts import FusedFactors, Norm


def _missing(*arguments: Any, **options: Any) -> Any:
    return "this build of flysurgery has no fused kernels"


Operator = Callable[..., Tensor]
Reason = Callable[..., "str | None"]

ffn: Operator = getattr(ops, "ffn", _missing)
ffn_reason: Reason = getattr(ops, "ffn_reason", _missing)
norm_linear: Operator = getattr(ops, "norm_linear", _missing)
norm_linear_reason: Reason = getattr(ops, "norm_linear_reason", _missing)
linear_residual: Operator = getattr(ops, "linear_residual", _missing)
linear_residual_reason: Reason = getattr(ops, "linear_residual_reason", _missing)
patch_embedding: Operator = getattr(ops, "patch_embedding", _missing)
patch_embedding_reason: Reason = getattr(ops, "patch_embedding_reason", _missing)


def factors_of(linear: nn.Module) -> FusedFactors | None:
    """The factors and bias of a converted layer as they are now; None for any other module."""
    if type(linear) is not ButterflyLinear:
        return None
    return FusedFactors(tuple(linear.factors), linear.bias)


def group_of(linear: nn.Module) -> tuple[FusedFactors, ...] | None:
    """The layers side by side that a projection consists of: its parts, or itself; None where one of them is dense."""
    parts = list(linear.children()) if type(linear) is SplitLinear else [linear]
    found = [factors_of(part) for part in parts]
    return None if any(each is None for each in found) else tuple(each for each in found if each is not None)


def norm_of(norm: nn.Module, eps: float) -> Norm:
    """The weight and bias of a layer norm as they are now."""
    return Norm(getattr(norm, "weight", None), getattr(norm, "bias", None), eps)


def under_autocast(x: Tensor) -> str | None:
    """Why a kernel, which computes in the dtype of x, may not run here."""
    if x.device.type != "meta" and torch.is_autocast_enabled(x.device.type):
        return "autocast decides the dtype of each operation here"
    return None
