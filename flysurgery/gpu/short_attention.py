"""Scaled dot-product attention of halves whose keys and values fit in shared memory (sm_90a), with its registered operator."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache, partial

import torch
from torch import Tensor

from flysurgery.errors import BackendError
from flysurgery.gpu.attended import AttentionLaunch, attended, tokens_before_heads
from flysurgery.gpu.kernel import Kernel, load_kernel
from flysurgery.gpu.modes import HALF_MODES, MODE_NUMBERS
from flysurgery.gpu.obstacles import multiprocessors_of, shared_limit_of
from flysurgery.gpu.registered import Operator

_ROW_BYTES = 128


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
    """The most keys of a chunk: more scores would leave too few registers."""
    slot_counts = range(24, 4, -1)
    most_last = 8
    fewest_tiles = 3
    """With separate last queries: a warpgroup that has multiplied such a tile takes another tile before its next one of these."""

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

    def defines(self, mode: str) -> dict[str, int]:
        """The macros that the kernel is compiled with."""
        sizes = {"CHUNK": self.chunk, "CHUNKS": self.chunks, "ROWS": self.rows, "TILES": self.tiles, "SLOTS": self.slots}
        return {"MODE": MODE_NUMBERS[mode], **sizes, "LAST": int(self.last)}


def short_attention(head: int, queries: int, keys: int, dtype: torch.dtype, shared_limit: int) -> WarpgroupAttention | str:
    """The sizes for heads of so many features, queries and keys, or the reason why the kernel takes none."""
    if dtype not in HALF_MODES or head != WarpgroupAttention.head:
        return f"the attention kernel for short sequences takes heads of {WarpgroupAttention.head} halves, got {head} of {dtype}"
    chunks = -(-keys // WarpgroupAttention.most_chunk)
    chunk = _up(-(-keys // chunks), 16)
    rows = max(chunk * chunks, _up(queries, 16))
    tiles = -(-queries // 64)
    last = tiles >= WarpgroupAttention.fewest_tiles and queries - 64 * (tiles - 1) <= WarpgroupAttention.most_last
    for slots in WarpgroupAttention.slot_counts:
        sizes = WarpgroupAttention(chunk, chunks, rows, tiles, slots, last)
        if sizes.shared_bytes <= shared_limit:
            return sizes
    return f"{queries} queries and {keys} keys of {head} halves exceed {shared_limit} bytes of shared memory; PyTorch has a kernel for them"


_sizes = lru_cache(maxsize=1024)(short_attention)


def short_attention_obstacle(head: int, queries: int, keys: int, dtype: torch.dtype, shared_limit: int) -> str | None:
    """Why the kernel takes no heads of so many features, queries and keys; None where it does."""
    sizes = short_attention(head, queries, keys, dtype, shared_limit)
    return sizes if isinstance(sizes, str) else None


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
    sizes = _sizes(q.shape[3], q.shape[2], k.shape[2], q.dtype, shared_limit_of(q.device.index))
    if isinstance(sizes, str):
        raise BackendError(sizes)
    if scale <= 0:  # the kernel takes the maximum before it scales
        q, scale = q * scale, 1.0
    return attended(q, k, v, scale, partial(_launch, sizes=sizes))


def _launch(q: Tensor, k: Tensor, sizes: WarpgroupAttention) -> AttentionLaunch:
    heads = q.shape[0] * q.shape[1]
    grid = (min(heads, multiprocessors_of(q.device.index)), 1, 1)
    kernel = _kernel(sizes, HALF_MODES[q.dtype], q.device.index)
    return AttentionLaunch(kernel, grid, 32 * sizes.warps, sizes.shared_bytes, (heads,), early=True, boxes=sizes.boxes)


@lru_cache(maxsize=64)
def _kernel(sizes: WarpgroupAttention, mode: str, device_index: int) -> Kernel:
    return load_kernel(sizes.source, sizes.defines(mode), name="short_attention", device_index=device_index)


short_attention_operator = Operator(
    "short_attention(Tensor q, Tensor k, Tensor v, float scale) -> Tensor", run_short_attention, lambda q, given: tokens_before_heads(q)
)
