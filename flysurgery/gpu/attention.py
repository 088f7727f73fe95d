"""Scaled dot-product attention in one launch, which reads q, k and v where they lie in memory, and its gradients in another."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import torch
from torch import Tensor

from flysurgery.errors import BackendError
from flysurgery.gpu.device import multiprocessors_of, shared_limit_of
from flysurgery.gpu.kernel import current_stream, float_bits, kernel_of, sized_kernel
from flysurgery.gpu.modes import HALF_MODES, HALVES, macros
from flysurgery.gpu.recording import fresh
from flysurgery.gpu.tensor_map import boxes

_HEAD = 64
_MOST_CHUNK = {"fp16": 208, "bf16": 208, "tf32": 208, "fp32": 112}
"""Keys whose scores a thread holds at once. More would leave too few registers."""
_SLOTS = {"fp16": range(24, 4, -1), "bf16": range(24, 4, -1), "tf32": range(8, 2, -1), "fp32": range(8, 2, -1)}
_BATCH = {"tf32": 13, "fp32": 8}
"""Pieces of rows on their way to a thread that brings, the faster of 4, 8 and 13."""
_MOST_LAST = 8
_FEWEST_TILES = 3
"""With separate last queries: a warpgroup that has multiplied such a tile takes another tile before its next one of these."""
_MOST_BLOCKS = 396
"""Three blocks for each multiprocessor of an H200, which all run at once. PyTorch's kernels, with larger blocks, take more."""
_STEPS = 2  # of 16 keys, of a warp
_MOST_WARPS = 8
_TILE = 16  # queries of a block
_SUMMING_WARPS = 15
"""Of a block, each with room for the sums of a head: twelve of queries, and three that sum the gradients of the results."""


@dataclass(frozen=True)
class RingAttention:
    """Sizes of ``short_attention.cu`` for halves, ``attention.cu`` for float32, with heads of 64 features."""

    threads: ClassVar[int] = 32 * 16
    mode: str
    chunk: int  # keys whose scores a thread has at once
    chunks: int  # of a sequence
    rows: int  # of a slot, which holds the queries, the keys or the values of a head
    tiles: int  # of 64 queries
    slots: int  # of the ring
    last: bool  # whether the last tile has so few queries that they are multiplied apart; halves only

    @property
    def kernel(self) -> str:
        return "short_attention" if self.mode in HALVES else "attention"

    @property
    def shared_bytes(self) -> int:
        """Of a block: ring, barriers, what the last tile reads beyond or its warps exchange; of float32 maxima and exponents of rows."""
        row, keys = 2 * _HEAD, self.chunk * self.chunks
        if self.mode not in HALVES:
            slot = (2 if self.mode == "fp32" else 1) * self.rows * row
            return self.slots * (slot + 16 + 4 * 64 * self.tiles) + max(64 * self.tiles - self.rows, 0) * row + 32
        ring = self.slots * (self.rows * row + 16) + _up(-(-self.slots // 3), 2) * 8
        read = _up(keys, 64) if self.last else 64 * self.tiles
        met = 16 * keys + 2 * 4 * 4 * _MOST_LAST if self.last else 0
        return ring + max(read - self.rows, 0) * row + met

    @property
    def boxes(self) -> int:
        """Rows of the boxes by which the copy engine brings and fetches a slot, up to 256; 0 for float32, which threads bring."""
        return _box_rows(self.rows) if self.mode in HALVES else 0

    def defines(self, log_sums: bool = False) -> dict[str, int]:
        """The macros that the kernel is compiled with; ``log_sums`` says whether the kernel of halves writes them."""
        return macros(self, batch=_BATCH.get(self.mode, 0), log_sums=log_sums)


@lru_cache(maxsize=1024)
def ring_attention(head: int, queries: int, keys: int, mode: str, shared_limit: int) -> RingAttention | str:
    """The sizes for heads of so many features, queries and keys, or the reason why no kernel takes them."""
    if head != _HEAD:
        return f"the attention kernels for whole heads take {_HEAD} features, got {head}"
    chunks = -(-keys // _MOST_CHUNK[mode])
    chunk, tiles = _up(-(-keys // chunks), 16), -(-queries // 64)
    rows = max(chunk * chunks, _up(queries, 16))
    last = mode in HALVES and tiles >= _FEWEST_TILES and queries - 64 * (tiles - 1) <= _MOST_LAST
    for slots in _SLOTS[mode]:
        sizes = RingAttention(mode, chunk, chunks, rows, tiles, slots, last)
        if sizes.shared_bytes <= shared_limit:
            return sizes
    return (
        f"{queries} queries and {keys} keys of {head} features exceed {shared_limit} bytes of shared memory; PyTorch has a kernel for them"
    )


def _box_rows(rows: int) -> int:
    return rows // -(-rows // 256)


def _up(count: int, unit: int) -> int:
    return -(-count // unit) * unit


def few_attention_obstacle(heads: int, queries: int, keys: int, head: int, dtype: torch.dtype) -> str | None:
    """Why the kernel for few queries does not take this many heads, of all images, with this many queries and keys; None where it does."""
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


def attention_obstacle(head: int, queries: int, keys: int, mode: str, shared_limit: int) -> str | None:
    """Why no kernel for whole heads takes so many features, queries and keys; None where one does."""
    sizes = ring_attention(head, queries, keys, mode, shared_limit)
    return sizes if isinstance(sizes, str) else None


def run_attention(
    q: Tensor,  # shape: (batch, heads, queries, head)
    k: Tensor,  # shape: (batch, heads, keys, head)
    v: Tensor,  # shape: (batch, heads, keys, head)
    scale: float,
    mode: str,
    few: bool,
    log_sums: Tensor | None = None,  # shape: (batch, heads, queries), float32, to be filled
) -> Tensor:  # shape: (batch, heads, queries, head), tokens before heads in memory
    """``softmax(scale * q @ k.mT) @ v`` on the current stream, sums and softmax in float32. Without queries nothing is launched.

    ``log_sums`` becomes the logarithm, by base 2, of each query's sum of exponentials: of halves, without ``few``, for scales above zero.
    ``few`` takes the kernel for few queries, which reads keys and values once for 16 of them; the others read each head once. Inputs that
    they do not read in place are copied.

    Raises:
        BackendError: sizes that ``few_attention_obstacle`` or ``attention_obstacle`` tells beforehand, or the kernel does not launch.
    """
    (batch, heads, queries, head), keys, device_index = q.shape, k.shape[2], q.device.index
    y = fresh((batch, queries, heads, head), q.dtype, q.device).transpose(1, 2)
    if y.numel() == 0:
        return y
    sizes = None if few else ring_attention(head, queries, keys, mode, shared_limit_of(device_index))
    obstacle = few_attention_obstacle(batch * heads, queries, keys, head, q.dtype) if few else sizes
    if isinstance(obstacle, str):
        raise BackendError(obstacle)
    if sizes is not None and scale <= 0:  # these kernels take the maximum before they scale
        q, scale = q * scale, 1.0
    q, k, v = [part if reads_in_place(part) else part.contiguous() for part in (q, k, v)]
    strides = [*q.stride()[:3], *k.stride()[:3], *v.stride()[:3]]
    numbers, stream = (queries, keys, heads), current_stream(device_index)
    if isinstance(sizes, RingAttention):
        places = [*(boxes(part, sizes.boxes) for part in (q, k, v, y)), log_sums] if sizes.boxes else [q, k, v, y, *strides]
        launch = (min(batch * heads, multiprocessors_of(device_index)), 1, 1), (sizes.threads, 1, 1), sizes.shared_bytes
        # It may begin while the kernel before still runs, for which it waits by itself.
        kernel_of(sizes, device_index, log_sums is not None).launch(
            *launch, stream, *places, *numbers, batch * heads, float_bits(scale), early=True
        )
        return y
    warps = -(-keys // (16 * _STEPS))
    bytes_of_warp = max(16 * _STEPS * (2 * head + 16), 4 * _TILE * (head + 8)) + 8 * _TILE
    launch = (-(-queries // _TILE), batch * heads, 1), (32 * warps, 1, 1), warps * bytes_of_warp
    kernel = sized_kernel("few_attention", device_index, head=head, warps=warps, steps=_STEPS, mode=q.dtype)
    kernel.launch(*launch, stream, q, k, v, y, *strides, *numbers, float_bits(scale))
    return y


@dataclass(frozen=True)
class AttentionGradient:
    """Sizes of ``attention_gradient.cu``, for heads of 64 features of halves."""

    kernel: ClassVar[str] = "attention_gradient"
    threads: ClassVar[int] = 32 * 16
    mode: str
    rows: int  # of a slot, which holds the queries, the keys, the values or the gradients of a head
    tiles: int  # of 64 rows
    heads: int  # whose slots are in shared memory at once

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block: slots, what the last tile reads beyond them, two numbers a query, sums, and barriers."""
        row, reached = 2 * _HEAD, 64 * self.tiles
        return self.heads * (4 * self.rows * row + 8 * reached + 24) + (reached - self.rows) * row + _SUMMING_WARPS * 4 * _HEAD

    @property
    def boxes(self) -> int:
        return _box_rows(self.rows)

    def defines(self) -> dict[str, int]:
        return macros(self)


@lru_cache(maxsize=1024)
def attention_gradient(head: int, queries: int, keys: int, mode: str, shared_limit: int) -> AttentionGradient | None:
    """The sizes of the kernel of gradients; None where it or ``run_attention`` does not take these heads."""
    if queries != keys or queries == 0 or mode not in HALVES or isinstance(ring_attention(head, queries, keys, mode, shared_limit), str):
        return None
    for heads in (2, 1):
        sizes = AttentionGradient(mode, _up(keys, 32 if keys > 256 else 16), -(-keys // 64), heads)
        if sizes.shared_bytes <= shared_limit:
            return sizes
    return None


def run_attention_gradient(
    sizes: AttentionGradient,
    inputs: Sequence[Tensor],  # q, k, v, each of shape (batch, heads, tokens, 64)
    y: Tensor,  # shape: (batch, heads, tokens, 64)
    log_sums: Tensor,  # shape: (batch, heads, tokens), as ``run_attention`` leaves it
    dy: Tensor,  # shape: (batch, heads, tokens, 64)
    scale: float,
    gradients: Sequence[Tensor],  # of q, k, v, to be filled: of their shapes, and all of the same strides
    sums: Sequence[Tensor | None] = (None, None, None),  # likewise, each of shape (``parts_of_sums``, heads, 64), float32
) -> None:
    """The gradients of q, k and v in one launch on the current stream; sums are float32, each in one order.

    ``scale`` is above zero. Features of the gradients are adjacent, and their rows begin at multiples of 16 bytes; other tensors that lie
    differently are copied. ``sums`` become sums of parts of the gradients over images and tokens, as they were without rounding: those of
    k are zeros. Their strides are those of the gradients' tokens, heads and features.
    """
    (batch, heads, tokens, _), index = y.shape, y.device.index
    *inputs, y, dy = [part if reads_in_place(part) else part.contiguous() for part in (*inputs, y, dy)]
    strides = [step for each in (y, gradients[0]) for step in each.stride()[:3]]
    maps = [boxes(part, sizes.boxes) for part in (*inputs, dy)]
    launch = (heads * parts_of_sums(batch, heads, index), 1, 1), (sizes.threads, 1, 1), sizes.shared_bytes
    numbers = tokens, heads, batch * heads, float_bits(scale)
    kernel_of(sizes, index).launch(*launch, current_stream(index), *maps, y, log_sums, *gradients, *sums, *strides, *numbers, early=True)


def parts_of_sums(batch: int, heads: int, device_index: int) -> int:
    """The parts in which ``run_attention_gradient`` leaves sums: blocks that have the same head."""
    return min(batch, max(1, multiprocessors_of(device_index) // heads))


def reads_in_place(part: Tensor) -> bool:
    """Whether the kernels read a tensor where it lies: features are adjacent, rows begin at multiples of 16 bytes, and none twice."""
    steps, unit = part.stride(), 16 // part.element_size()
    aligned = part.data_ptr() % 16 == 0 and all(step % unit == 0 for step in steps[:3])
    return aligned and steps[3] == 1 and all(step > 0 or size == 1 for step, size in zip(steps, part.shape, strict=True))
