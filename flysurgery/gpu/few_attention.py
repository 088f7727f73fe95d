"""Scaled dot-product attention of halves for few queries, with its registered operator."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from flysurgery.errors import BackendError
from flysurgery.gpu.attended import AttentionLaunch, attended, tokens_before_heads
from flysurgery.gpu.kernel import Kernel, load_kernel
from flysurgery.gpu.modes import DTYPE_NUMBERS, HALF_MODES
from flysurgery.gpu.registered import Operator

_MOST_BLOCKS = 396
"""Three blocks for each multiprocessor of an H200, which all run at once. PyTorch's kernels, with larger blocks, take more."""
_STEPS = 2  # of 16 keys, of a warp
_MOST_WARPS = 8
_TILE = 16  # queries of a block


def few_attention_obstacle(heads: int, queries: int, keys: int, head: int, dtype: torch.dtype) -> str | None:
    """Why the kernel does not take this many heads, of all images, with this many queries and keys each; None where it does."""
    if dtype not in HALF_MODES:
        return f"the attention kernel for few queries takes float16 and bfloat16, not {dtype}"
    if head not in (32, 64):
        return f"the attention kernel for few queries takes heads of 32 or 64 features, got {head}"
    if keys > 16 * _STEPS * _MOST_WARPS:
        return f"the attention kernel for few queries takes up to {16 * _STEPS * _MOST_WARPS} keys, got {keys}"
    blocks = -(-queries // _TILE) * heads
    if blocks > _MOST_BLOCKS:
        most = f"{_MOST_BLOCKS} times {_TILE} queries of a head"
        return f"PyTorch's attention of halves is on tensor cores, and a kernel takes only up to {most}, got {blocks}"
    return None


def run_few_attention(
    q: Tensor,  # shape: (batch, heads, queries, head)
    k: Tensor,  # shape: (batch, heads, keys, head)
    v: Tensor,  # shape: (batch, heads, keys, head)
    scale: float,
) -> Tensor:  # shape: (batch, heads, queries, head), tokens before heads in memory
    """``softmax(scale * q @ k.mT) @ v`` on the current stream, sums and softmax in float32; keys and values are read once for 16 queries.

    Raises:
        BackendError: sizes that ``few_attention_obstacle`` tells beforehand, or the kernel does not compile or launch.
    """
    batch, heads, queries, head = q.shape
    obstacle = few_attention_obstacle(batch * heads, queries, k.shape[2], head, q.dtype)
    if obstacle is not None:
        raise BackendError(obstacle)
    return attended(q, k, v, scale, _launch)


def _launch(q: Tensor, k: Tensor) -> AttentionLaunch:
    batch, heads, queries, head = q.shape
    warps = -(-k.shape[2] // (16 * _STEPS))
    bytes_of_warp = max(16 * _STEPS * (2 * head + 16), 4 * _TILE * (head + 8)) + 8 * _TILE
    kernel, grid = _kernel(head, q.dtype, warps, q.device.index), (-(-queries // _TILE), batch * heads, 1)
    return AttentionLaunch(kernel, grid, 32 * warps, warps * bytes_of_warp)


@lru_cache(maxsize=64)
def _kernel(head: int, dtype: torch.dtype, warps: int, device_index: int) -> Kernel:
    defines = {"HEAD": head, "WARPS": warps, "STEPS": _STEPS, "MODE": DTYPE_NUMBERS[dtype]}
    return load_kernel("few_attention.cu", defines, name="few_attention", device_index=device_index)


few_attention_operator = Operator(
    "few_attention(Tensor q, Tensor k, Tensor v, float scale) -> Tensor", run_few_attention, lambda q, given: tokens_before_heads(q)
)
