"""How an operator is run, decided once for operands of the same shapes, dtypes and devices under the same settings of PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from operator import attrgetter
from typing import TypeVar

import torch
from torch import Tensor

from flysurgery.ops.autocast import autocast_dtype
from flysurgery.ops.cuda.modes import tf32_allowed
from flysurgery.ops.problem import is_tracing
from flysurgery.ops.registry import BACKENDS

Found = TypeVar("Found")

_REMEMBERED = 4096
_requires_grad, _looks = attrgetter("requires_grad"), attrgetter("shape", "dtype", "device")
_decided: dict[tuple[Hashable, ...], object] = {}


def decided(decide: Callable[[], Found], tensors: Sequence[Tensor], *asked: Hashable) -> Found:
    """``decide()``, remembered unless somebody traces, who may hold symbols in place of sizes.

    Args:
        tensors: all operands, x first.
        asked: what else the decision depends on, beside PyTorch's settings and the registered backends.
    """
    if is_tracing(*tensors):
        return decide()
    x = tensors[0]
    autocast = None
    if torch._C._is_any_autocast_enabled():
        autocast = autocast_dtype("cuda" if x.is_cuda else x.device.type)
    tf32 = (autocast or x.dtype) == torch.float32 and x.is_cuda and tf32_allowed()
    gradients = torch.is_grad_enabled() and any(map(_requires_grad, tensors))
    key = (*asked, autocast, tf32, gradients, *BACKENDS.values(), *map(_looks, tensors))
    try:
        return _decided[key]  # pyright: ignore[reportReturnType] - what was asked tells the type
    except KeyError:
        pass
    found = decide()
    if len(_decided) >= _REMEMBERED:
        _decided.clear()
    _decided[key] = found
    return found
