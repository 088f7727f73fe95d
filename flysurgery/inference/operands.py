"""The operands that modules give to the fused operators."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from flysurgery.layers import ButterflyLinear, SplitLinear
from flysurgery.ops import Dense, FusedFactors, Linear, Norm


def linear_of(linear: nn.Module | None) -> Linear | None:
    """The factors or the weight of a linear layer, and its bias, as they are now; None for any other module."""
    if linear is None or not is_plain(linear):
        return None
    if type(linear) is ButterflyLinear:
        return FusedFactors(*linear.own_parameters())
    return Dense(linear.weight, linear.bias) if type(linear) is nn.Linear else None


def group_of(linear: nn.Module) -> tuple[Linear, ...] | None:
    """The layers side by side that a projection consists of: its parts, or itself; None where one of them is no linear layer."""
    found: list[Linear] = []
    for part in linear._modules.values() if type(linear) is SplitLinear and is_plain(linear) else (linear,):
        known = linear_of(part)
        if known is None:
            return None
        found.append(known)
    return tuple(found)


def is_plain(module: nn.Module) -> bool:
    """Whether the forward of a module is that of its class. A forward that is set on the module itself may compute anything."""
    return "forward" not in vars(module)


def norm_of(norm: nn.Module, eps: float) -> Norm:
    """The weight and bias of a layer norm as they are now."""
    return Norm(getattr(norm, "weight", None), getattr(norm, "bias", None), eps)


def unwatched(x: Tensor) -> AbstractContextManager[object]:
    """A block in which modes that watch functions of PyTorch, such as ``Attending``, do not see accesses to plain tensors."""
    plain = type(x) is Tensor and not torch.compiler.is_compiling()
    return torch._C.DisableTorchFunction() if plain else nullcontext()


def watched() -> bool:
    """Whether a compiler, a mode that watches functions of PyTorch, or a hook on all modules must see all calls of a module."""
    return torch.compiler.is_compiling() or bool(torch._C._len_torch_function_stack() or nn.modules.module._has_any_global_hook())


def under_autocast(x: Tensor) -> str | None:
    """Why a kernel, which computes in the dtype of x, may not run here."""
    if x.device.type != "meta" and torch.is_autocast_enabled(x.device.type):
        return "autocast decides the dtype of each operation here"
    return None
