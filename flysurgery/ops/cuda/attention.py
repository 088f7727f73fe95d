"""Scaled dot-product attention of float32 on tensor cores, with its registered operator."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from flysurgery.errors import BackendError
from flysurgery.ops.cuda.kernel import Kernel, current_stream, float_bits, load_kernel

_MODES = {"tf32": 2, "fp32": 3}
_KEYS = 48
"""Of a block: more run out of registers, fewer meet more often."""


def attention_obstacle(head: int, mode: str) -> str | None:
    """Why the kernel takes no heads of so many features; None where it does."""
    if mode not in _MODES:
        return f"the attention kernel has the modes {', '.join(_MODES)}, not '{mode}'"
    if head % 16 or not 0 < head <= 64:
        return f"the attention kernel takes heads of 16, 32, 48 or 64 features, got {head}"
    return None


def run_attention(
    q: Tensor,  # shape: (batch, heads, queries, head)
    k: Tensor,  # shape: (batch, heads, keys, head)
    v: Tensor,  # shape: (batch, heads, keys, head)
    scale: float,
    mode: str,
) -> Tensor:  # shape: (batch, heads, queries, head), tokens before heads in memory
    """``softmax(scale * q @ k.mT) @ v`` on the current stream; keys and values are read once for 64 or 128 queries.

    Any strides whose features are adjacent and whose rows begin at multiples of 16 bytes; others are copied.

    Raises:
        BackendError: sizes that ``attention_obstacle`` tells beforehand, or the kernel does not compile or launch.
    """
    device_index = q.device.index
    if device_index != torch.cuda.current_device():
        with torch.cuda.device(device_index):
            return run_attention(q, k, v, scale, mode)
    batch, heads, queries, head = q.shape
    obstacle = attention_obstacle(head, mode)
    if obstacle is not None:
        raise BackendError(obstacle)
    y = tokens_before_heads(q)
    if y.numel() == 0:
        return y
    q, k, v = in_vectors(q, k, v)
    warps = 8 if queries > 64 else 4
    images, pitch = 4 if mode == "fp32" else 2, 2 * head + 16
    _kernel(head, mode, warps, device_index).launch(
        (-(-queries // (16 * warps)), batch * heads, 1),
        (32 * warps, 1, 1),
        images * _KEYS * pitch + 2 * _KEYS * head * 4 + 8,
        current_stream(device_index),
        *(q, k, v, y, *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], queries, k.shape[2], heads, float_bits(scale)),
    )
    return y


def in_vectors(*parts: Tensor) -> tuple[Tensor, ...]:
    """The parts, those copied whose features are not adjacent or whose rows do not begin at multiples of 16 bytes."""
    return tuple(part if _readable(part) else part.contiguous() for part in parts)


def _readable(part: Tensor) -> bool:
    *strides, adjacent = part.stride()
    return adjacent == 1 and part.data_ptr() % 16 == 0 and not any(stride * part.element_size() % 16 for stride in strides)


def tokens_before_heads(q: Tensor) -> Tensor:  # shape: (batch, heads, queries, head)
    """An empty tensor of the shape of q, tokens before heads in memory."""
    batch, heads, queries, head = q.shape
    return q.new_empty((batch, queries, heads, head)).transpose(1, 2)


@lru_cache(maxsize=64)
def _kernel(head: int, mode: str, warps: int, device_index: int) -> Kernel:
    defines = {"HEAD": head, "KEYS": _KEYS, "MODE": _MODES[mode], "WARPS": warps}
    return load_kernel("attention.cu", defines, name="attention", device_index=device_index)


def _fake_attention(q: Tensor, k: Tensor, v: Tensor, scale: float, mode: str) -> Tensor:
    return tokens_before_heads(q)


_library = torch.library.Library("flysurgery", "FRAGMENT")
_library.define("attention(Tensor q, Tensor k, Tensor v, float scale, str mode) -> Tensor")
_library.impl("attention", run_attention, "CUDA")
torch.library.register_fake("flysurgery::attention", _fake_attention, lib=_library)
