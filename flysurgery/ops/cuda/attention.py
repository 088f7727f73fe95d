"""Scaled dot-product attention of float32 on tensor cores, with its registered operator."""

from __future__ import annotations

from functools import lru_cache, partial

from torch import Tensor

from flysurgery.errors import BackendError
from flysurgery.ops.cuda.attended import AttentionLaunch, attended, tokens_before_heads
from flysurgery.ops.cuda.kernel import Kernel, load_kernel
from flysurgery.ops.cuda.registered import Operator

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

    Raises:
        BackendError: sizes that ``attention_obstacle`` tells beforehand, or the kernel does not compile or launch.
    """
    obstacle = attention_obstacle(q.shape[3], mode)
    if obstacle is not None:
        raise BackendError(obstacle)
    return attended(q, k, v, scale, partial(_launch, mode=mode))


def _launch(q: Tensor, k: Tensor, mode: str) -> AttentionLaunch:
    batch, heads, queries, head = q.shape
    warps = 8 if queries > 64 else 4
    images, pitch = 4 if mode == "fp32" else 2, 2 * head + 16
    kernel, grid = _kernel(head, mode, warps, q.device.index), (-(-queries // (16 * warps)), batch * heads, 1)
    return AttentionLaunch(kernel, grid, 32 * warps, images * _KEYS * pitch + 2 * _KEYS * head * 4 + 8)


@lru_cache(maxsize=64)
def _kernel(head: int, mode: str, warps: int, device_index: int) -> Kernel:
    defines = {"HEAD": head, "KEYS": _KEYS, "MODE": _MODES[mode], "WARPS": warps}
    return load_kernel("attention.cu", defines, name="attention", device_index=device_index)


def _fake_attention(q: Tensor, k: Tensor, v: Tensor, scale: float, mode: str) -> Tensor:
    return tokens_before_heads(q)


attention_operator = Operator("attention(Tensor q, Tensor k, Tensor v, float scale, str mode) -> Tensor", run_attention, _fake_attention)
