"""Attention on tensor cores where PyTorch has none or a slower one, and why no kernel takes it."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from flysurgery.errors import BackendError
from flysurgery.ops.cuda.attention import attention_obstacle, attention_operator
from flysurgery.ops.cuda.device import device_obstacle
from flysurgery.ops.cuda.few_attention import few_attention_obstacle, few_attention_operator
from flysurgery.ops.cuda.modes import present_mode
from flysurgery.ops.cuda.obstacles import shared_limit_of
from flysurgery.ops.cuda.short_attention import short_attention_obstacle, short_attention_operator
from flysurgery.ops.decided import decided
from flysurgery.ops.epilogue import common_obstacle
from flysurgery.ops.stage import Stage, Way


class _Operands(NamedTuple):
    k: Tensor
    v: Tensor
    scale: float


def attention(
    q: Tensor,  # shape: (batch, heads, queries, head)
    k: Tensor,  # shape: (batch, heads, keys, head)
    v: Tensor,  # shape: (batch, heads, keys, head)
    scale: float | None = None,
) -> Tensor:  # shape: (batch, heads, queries, head)
    """``softmax(scale * q @ k.mT) @ v`` on tensor cores; ``scale`` None stands for one over the root of a head's features.

    Of float32 by pairs of fp16, or in TF32 grade where PyTorch's settings allow that; of halves for few queries and for short
    sequences. The result's tokens lie before its heads in memory.

    Raises:
        BackendError: no kernel takes this; the message is what ``attention_reason`` answers.
    """
    way = attention_way(q, k, v, scale)
    if isinstance(way, str):
        raise BackendError(way)
    return way.run()


def attention_way(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> Way | str:
    """How ``attention`` computes this, or why no kernel takes it."""
    stages = decided(lambda: _stages(q, k, v), (q, k, v), "attention")
    return stages if isinstance(stages, str) else Way(stages, q, _Operands(k, v, q.shape[-1] ** -0.5 if scale is None else scale))


def attention_reason(q: Tensor, k: Tensor, v: Tensor) -> str | None:
    """Why no kernel takes this attention; None where one does."""
    way = attention_way(q, k, v)
    return way if isinstance(way, str) else None


def _stages(q: Tensor, k: Tensor, v: Tensor) -> tuple[Stage, ...] | str:
    """Which kernel takes this attention, or why none does."""
    wrong = common_obstacle(q, (k, v))
    if wrong is not None:
        return wrong
    if q.dim() != 4 or k.shape != (*q.shape[:2], k.shape[-2], q.shape[-1]) or k.shape != v.shape or not q.dtype == k.dtype == v.dtype:
        kinds = ", ".join(f"{tuple(part.shape)} of {part.dtype}" for part in (q, k, v))
        return f"expected q, k and v of shapes (batch, heads, tokens, features) that fit each other, and one dtype, got {kinds}"
    if k.shape[2] == 0:
        return "there are no keys"
    if q.dtype == torch.float32:
        mode = str(present_mode(q.dtype))
        return _attention_obstacle(q.shape[-1], mode, q.device.index) or (Stage((), partial(_floats, mode=mode)),)
    obstacle = _device_obstacle(q.device.index)
    if obstacle is not None:
        return obstacle
    if few_attention_obstacle(q.shape[0] * q.shape[1], q.shape[2], k.shape[2], q.shape[3], q.dtype) is None:
        return (Stage((), lambda y, q, given: few_attention_operator(q, *given)),)
    obstacle = short_attention_obstacle(k.shape[2], q.shape[3], q.dtype, _shared_limit(q.device.index))
    return obstacle or (Stage((), lambda y, q, given: short_attention_operator(q, *given)),)


def _floats(y: Tensor, q: Tensor, given: _Operands, mode: str) -> Tensor:
    return attention_operator(q, *given, mode)


@torch.compiler.assume_constant_result
def _device_obstacle(device_index: int) -> str | None:
    return device_obstacle(device_index)


@torch.compiler.assume_constant_result
def _shared_limit(device_index: int) -> int:
    return shared_limit_of(device_index)


@torch.compiler.assume_constant_result
def _attention_obstacle(head: int, mode: str, device_index: int) -> str | None:
    return device_obstacle(device_index) or attention_obstacle(head, mode)
