"""What modules give to the fused operators."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from flysurgery.layers import ButterflyLinear, SplitLinear
from flysurgery.ops.parts import FusedFactors, Norm


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
