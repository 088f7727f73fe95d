"""The launch that the attention kernels share. It reads q, k and v where they lie in memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from flysurgery.gpu.kernel import Kernel, current_stream, float_bits
from flysurgery.gpu.replay.recording import fresh
from flysurgery.gpu.tensor_map import head_boxes


class AttentionLaunch(NamedTuple):
    """A kernel, with the number of blocks and threads of its launch and the dynamic shared memory of a block."""

    kernel: Kernel
    grid: tuple[int, int, int]
    threads: int
    shared_bytes: int
    more: tuple[int, ...] = ()  # what the kernel needs besides the sizes of q and k
    early: bool = False  # whether it may begin while the kernel before still runs; it waits for that kernel by itself
    boxes: int = 0  # rows of boxes, where the kernel takes maps of q, k, v and y; else it takes their addresses and strides


def attended(
    q: Tensor,  # shape: (batch, heads, queries, head)
    k: Tensor,  # shape: (batch, heads, keys, head)
    v: Tensor,  # shape: (batch, heads, keys, head)
    scale: float,
    launch_for: Callable[[Tensor, Tensor], AttentionLaunch],  # takes q and k
) -> Tensor:  # shape: (batch, heads, queries, head), tokens before heads in memory
    """``softmax(scale * q @ k.mT) @ v`` on the current stream. Without queries nothing is launched.

    Features must be adjacent, and rows must begin at multiples of 16 bytes; inputs that lie differently are copied.
    """
    device_index = q.device.index
    y = tokens_before_heads(q)
    if y.numel() == 0:
        return y
    q, k, v = [part if _readable(part) else part.contiguous() for part in (q, k, v)]
    kernel, grid, threads, shared_bytes, more, early, boxes = launch_for(q, k)
    if boxes:
        places = [head_boxes(part, boxes) for part in (q, k, v, y)]
    else:
        places = [q, k, v, y, *q.stride()[:3], *k.stride()[:3], *v.stride()[:3]]
    numbers = q.shape[2], k.shape[2], q.shape[1], *more, float_bits(scale)
    kernel.launch(grid, (threads, 1, 1), shared_bytes, current_stream(device_index), *places, *numbers, early=early)
    return y


def tokens_before_heads(q: Tensor) -> Tensor:  # shape: (batch, heads, queries, head)
    """An empty tensor of the shape of q, tokens before heads in memory."""
    batch, heads, queries, head = q.shape
    return fresh((batch, queries, heads, head), q.dtype, q.device).transpose(1, 2)


def _readable(part: Tensor) -> bool:
    steps, unit = part.stride(), 16 // part.element_size()
    aligned = part.data_ptr() % 16 == 0 and all(step % unit == 0 for step in steps[:3])
    return aligned and steps[3] == 1 and all(step > 0 or size == 1 for step, size in zip(steps, part.shape, strict=True))
