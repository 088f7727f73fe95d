"""Scaled dot-product attention of halves, of sequences whose keys and values fit in shared memory, with its registered operator."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache, partial

import torch
from torch import Tensor

from flysurgery.errors import BackendError
from flysurgery.ops.cuda.attended import AttentionLaunch, attended, tokens_before_heads
from flysurgery.ops.cuda.kernel import Kernel, device_arch, load_kernel
from flysurgery.ops.cuda.modes import HALF_MODES
from flysurgery.ops.cuda.obstacles import multiprocessors_of, shared_limit_of
from flysurgery.ops.cuda.registered import Operator

_MODES = {"fp16": 0, "bf16": 1}
_HEADS = (32, 64)
_ROW_BYTES = 128


@dataclass(frozen=True)
class WarpAttention:
    """Sizes of ``kernels/short_attention.cu``, whose blocks have one head each.

    Attributes:
        head: features of a head.
        keys: of a sequence, rounded up to 16.
        warps: of a block; they take 16 queries in turn.
    """

    head: int
    keys: int
    warps: int

    source = "short_attention.cu"
    most_warps = 7
    boxes = 0

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block: keys, values, and rows of y of each warp."""
        return 4 * self.keys * self.head + self.warps * 16 * (2 * self.head + 16)

    def grid(self, heads: int, device_index: int) -> tuple[int, tuple[int, ...]]:
        """The number of blocks for the heads of all images, and what the kernel must know of these."""
        return heads, ()

    def defines(self, mode: str) -> dict[str, int]:
        """The macros that the kernel is compiled with."""
        return {"MODE": _MODES[mode], "HEAD": self.head, "KEYS": self.keys, "STEPS": 3, "WARPS": self.warps, "BLOCKS": 2}


@dataclass(frozen=True)
class WarpgroupAttention:
    """Sizes of ``kernels/short_attention_wgmma.cu``, whose blocks stay and take head after head, of 64 features.

    Attributes:
        chunk: keys whose scores a thread has at once.
        chunks: of a sequence.
        rows: of a slot, which holds the queries, the keys or the values of a head.
        tiles: of 64 queries.
        slots: of the ring.
        last: whether the last tile has so few queries that they are multiplied apart.
    """

    chunk: int
    chunks: int
    rows: int
    tiles: int
    slots: int
    last: bool

    source = "short_attention_wgmma.cu"
    warps = 16
    head = 64
    most_chunk = 208
    """More scores leave too few registers."""
    slot_counts = range(24, 4, -1)
    most_last = 8
    fewest_tiles = 3
    """With last queries apart: a warpgroup that has multiplied such a tile takes another before the next of them."""

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block: the ring, its barriers, and what the last tile reads beyond it or its warps exchange."""
        ring = self.slots * (self.rows * _ROW_BYTES + 16) + _up(-(-self.slots // 3), 2) * 8
        read = _up(self.chunk * self.chunks, 64) if self.last else 64 * self.tiles
        met = 16 * self.chunk * self.chunks + 2 * 4 * 4 * self.most_last if self.last else 0
        return ring + max(read - self.rows, 0) * _ROW_BYTES + met

    @property
    def boxes(self) -> int:
        """Rows of the boxes by which the copy engine brings and fetches a slot: up to 256."""
        return self.rows // -(-self.rows // 256)

    def grid(self, heads: int, device_index: int) -> tuple[int, tuple[int, ...]]:
        """The number of blocks for the heads of all images, and what the kernel must know of these."""
        return min(heads, multiprocessors_of(device_index)), (heads,)

    def defines(self, mode: str) -> dict[str, int]:
        """The macros that the kernel is compiled with."""
        sizes = {"CHUNK": self.chunk, "CHUNKS": self.chunks, "ROWS": self.rows, "TILES": self.tiles, "SLOTS": self.slots}
        return {"MODE": _MODES[mode], **sizes, "LAST": int(self.last)}


def short_attention(head: int, queries: int, keys: int, shared_limit: int, *, wgmma: bool) -> WarpAttention | WarpgroupAttention:
    """How it is done for heads to which there is no ``short_attention_obstacle``, with or without wgmma."""
    chunks = -(-keys // WarpgroupAttention.most_chunk)
    chunk = _up(-(-keys // chunks), 16)
    rows = max(chunk * chunks, _up(queries, 16))
    tiles = -(-queries // 64)
    last = tiles >= WarpgroupAttention.fewest_tiles and queries - 64 * (tiles - 1) <= WarpgroupAttention.most_last
    by_slots = (WarpgroupAttention(chunk, chunks, rows, tiles, slots, last) for slots in WarpgroupAttention.slot_counts)
    fitting = (sizes for sizes in by_slots if wgmma and head == WarpgroupAttention.head and sizes.shared_bytes <= shared_limit)
    turns = -(-queries // (16 * WarpAttention.most_warps))
    return next(fitting, WarpAttention(head, _up(keys, 16), -(-queries // (16 * turns))))


def short_attention_obstacle(keys: int, head: int, dtype: torch.dtype, shared_limit: int) -> str | None:
    """Why no kernel takes heads of so many keys and features; None where one does, for any number of queries."""
    if dtype not in HALF_MODES or head not in _HEADS:
        return f"the attention kernels for short sequences take heads of {' or '.join(map(str, _HEADS))} halves, got {head} of {dtype}"
    if WarpAttention(head, _up(keys, 16), WarpAttention.most_warps).shared_bytes > shared_limit:
        return f"{keys} keys and values of {head} halves exceed {shared_limit} bytes of shared memory; PyTorch has a kernel for them"
    return None


def _up(count: int, unit: int) -> int:
    return -(-count // unit) * unit


def run_short_attention(
    q: Tensor,  # shape: (batch, heads, queries, head)
    k: Tensor,  # shape: (batch, heads, keys, head)
    v: Tensor,  # shape: (batch, heads, keys, head)
    scale: float,
) -> Tensor:  # shape: (batch, heads, queries, head), tokens before heads in memory
    """``softmax(scale * q @ k.mT) @ v`` on the current stream, sums and softmax in float32; q, k and v are read once.

    Raises:
        BackendError: sizes that ``short_attention_obstacle`` tells beforehand, or the kernel does not compile or launch.
    """
    obstacle = short_attention_obstacle(k.shape[2], q.shape[3], q.dtype, shared_limit_of(q.device.index))
    if obstacle is not None:
        raise BackendError(obstacle)
    return launch_short_attention(_sizes(q.shape[3], max(q.shape[2], 1), k.shape[2], q.device.index), q, k, v, scale)


def launch_short_attention(sizes: WarpAttention | WarpgroupAttention, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """The same by the kernel of one's choice."""
    if scale <= 0:  # the kernels take the maximum before they scale
        q, scale = q * scale, 1.0
    return attended(q, k, v, scale, partial(_launch, sizes=sizes))


def _launch(q: Tensor, k: Tensor, sizes: WarpAttention | WarpgroupAttention) -> AttentionLaunch:
    blocks, all_heads = sizes.grid(q.shape[0] * q.shape[1], q.device.index)
    kernel = _kernel(sizes, HALF_MODES[q.dtype], q.device.index)
    early = isinstance(sizes, WarpgroupAttention)  # whose devices, of compute capability 9.0, begin early
    return AttentionLaunch(kernel, (blocks, 1, 1), 32 * sizes.warps, sizes.shared_bytes, all_heads, early, sizes.boxes)


@lru_cache(maxsize=1024)
def _sizes(head: int, queries: int, keys: int, device_index: int) -> WarpAttention | WarpgroupAttention:
    return short_attention(head, queries, keys, shared_limit_of(device_index), wgmma=device_arch(device_index) == "sm_90a")


@lru_cache(maxsize=64)
def _kernel(sizes: WarpAttention | WarpgroupAttention, mode: str, device_index: int) -> Kernel:
    return load_kernel(sizes.source, sizes.defines(mode), name="short_attention", device_index=device_index)


def _fake_short_attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    return tokens_before_heads(q)


short_attention_operator = Operator(
    "short_attention(Tensor q, Tensor k, Tensor v, float scale) -> Tensor", run_short_attention, _fake_short_attention
)
