"""What the attention kernels share: one launch on the device of q, k and v, which it reads where they lie."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from flysurgery.ops.cuda.kernel import Kernel, current_device, current_stream, float_bits
from flysurgery.ops.cuda.notes import fresh


class AttentionLaunch(NamedTuple):
    """A kernel, and by how many blocks and threads and with how much dynamic shared memory of a block it is launched."""

    kernel: Kernel
    grid: tuple[int, int, int]
    threads: int
    shared_bytes: int
    more: tuple[int, ...] = ()  # what the kernel must know beside the sizes of q and k
    early: bool = False  # whether it may begin while the kernel before still runs, for which it waits by itself


def attended(
    q: Tensor,  # shape: (batch, heads, queries, head)
    k: Tensor,  # shape: (batch, heads, keys, head)
    v: Tensor,  # shape: (batch, heads, keys, head)
    scale: float,
    launch_for: Callable[[Tensor, Tensor], AttentionLaunch],  # takes q and k
) -> Tensor:  # shape: (batch, heads, queries, head), tokens before heads in memory
    """``softmax(scale * q @ k.mT) @ v`` on the current stream; nothing is launched where there are no queries.

    Any strides whose features are adjacent and whose rows begin at multiples of 16 bytes; others are copied.
    """
    device_index = q.device.index
    if device_index != current_device():
        with torch.cuda.device(device_index):
            return attended(q, k, v, scale, launch_for)
    y = tokens_before_heads(q)
    if y.numel() == 0:
        return y
    q, k, v = [part if _readable(part) else part.contiguous() for part in (q, k, v)]
    kernel, grid, threads, shared_bytes, more, early = launch_for(q, k)
    strides = *q.stride()[:3], *k.stride()[:3], *v.stride()[:3]
    sizes = q.shape[2], k.shape[2], q.shape[1]
    numbers = *strides, *sizes, *more, float_bits(scale)
    kernel.launch(grid, (threads, 1, 1), shared_bytes, current_stream(device_index), q, k, v, y, *numbers, early=early)
    return y


def tokens_before_heads(q: Tensor) -> Tensor:  # shape: (batch, heads, queries, head)
    """An empty tensor of the shape of q, tokens before heads in memory."""
    batch, heads, queries, head = q.shape
    return fresh((batch, queries, heads, head), q.dtype, q.device).transpose(1, 2)


def _readable(part: Tensor) -> bool:
    (first, second, third, adjacent), unit = part.stride(), 16 // part.element_size()
    return adjacent == 1 and part.data_ptr() % 16 == 0 and (first % unit or second % unit or third % unit) == 0
