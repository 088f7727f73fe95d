"""Scaled dot-product attention of float32 on tensor cores, with its registered operator."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache, partial

from torch import Tensor

from flysurgery.errors import BackendError
from flysurgery.ops.cuda.attended import AttentionLaunch, attended, tokens_before_heads
from flysurgery.ops.cuda.kernel import Kernel, device_arch, load_kernel
from flysurgery.ops.cuda.obstacles import multiprocessors_of, shared_limit_of
from flysurgery.ops.cuda.registered import Operator

_MODES = {"tf32": 2, "fp32": 3}


@dataclass(frozen=True)
class BlockAttention:
    """Sizes of ``kernels/attention.cu``, whose blocks have some queries of one head and go over its keys.

    Attributes:
        mode: ``"tf32"`` or ``"fp32"``.
        head: features of a head.
        warps: of a block, with 16 queries each.
    """

    mode: str
    head: int
    warps: int

    source = "attention.cu"
    keys = 48
    """Of a step: more run out of registers, fewer meet more often."""

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block: keys and values as they come, their halves or pairs of halves, and two maxima."""
        images = 4 if self.mode == "fp32" else 2
        return self.keys * (images * (2 * self.head + 16) + 8 * self.head) + 8

    def grid(self, heads: int, queries: int, device_index: int) -> tuple[tuple[int, int, int], tuple[int, ...]]:
        """The blocks for the heads of all images, and what the kernel must know of these."""
        return (-(-queries // (16 * self.warps)), heads, 1), ()

    def defines(self) -> dict[str, int]:
        """The macros that the kernel is compiled with."""
        return {"HEAD": self.head, "KEYS": self.keys, "MODE": _MODES[self.mode], "WARPS": self.warps}


@dataclass(frozen=True)
class HeadAttention:
    """Sizes of ``kernels/attention_wgmma.cu``, whose blocks stay and take head after head, of 64 features.

    Attributes:
        mode: ``"tf32"`` or ``"fp32"``.
        chunk: keys whose scores a thread has at once.
        chunks: of a sequence.
        rows: of a slot, which holds the queries, the keys or the values of a head.
        tiles: of 64 queries.
        slots: of the ring.
    """

    mode: str
    chunk: int
    chunks: int
    rows: int
    tiles: int
    slots: int

    source = "attention_wgmma.cu"
    warps = 16
    head = 64
    slot_counts = range(8, 2, -1)

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block: the ring, what the last tile reads beyond it, barriers, maxima, and exponents of rows."""
        row = 2 * self.head
        slot = (2 if self.mode == "fp32" else 1) * self.rows * row
        return self.slots * (slot + 16 + 4 * 64 * self.tiles) + max(64 * self.tiles - self.rows, 0) * row + 32

    def grid(self, heads: int, queries: int, device_index: int) -> tuple[tuple[int, int, int], tuple[int, ...]]:
        """The blocks for the heads of all images, and what the kernel must know of these."""
        return (min(heads, multiprocessors_of(device_index)), 1, 1), (heads,)

    def defines(self) -> dict[str, int]:
        """The macros that the kernel is compiled with."""
        sizes = {"CHUNK": self.chunk, "CHUNKS": self.chunks, "ROWS": self.rows, "TILES": self.tiles, "SLOTS": self.slots}
        return {"MODE": _MODES[self.mode], **sizes, "BATCH": _BATCH[self.mode]}


_MOST_CHUNK = {"tf32": 208, "fp32": 112}
"""Keys whose scores a thread has at once: more leave too few registers."""
_BATCH = {"tf32": 13, "fp32": 8}
"""Pieces of rows on their way to a thread that brings, the faster of 4, 8 and 13."""
_TOKENS = range(129, 209)
"""Queries and keys of a head for which a block takes whole heads."""


def block_attention(mode: str, head: int, queries: int) -> BlockAttention:
    """How it is done on any device."""
    return BlockAttention(mode, head, 8 if queries > 64 else 4)


def head_attention(mode: str, queries: int, keys: int, shared_limit: int) -> HeadAttention | None:
    """How it is done for heads of 64 features by wgmma; None where a head takes more than the shared memory."""
    chunks = -(-keys // _MOST_CHUNK[mode])
    chunk = _up(-(-keys // chunks), 16)
    rows = max(chunk * chunks, _up(queries, 16))
    by_slots = (HeadAttention(mode, chunk, chunks, rows, -(-queries // 64), slots) for slots in HeadAttention.slot_counts)
    return next((sizes for sizes in by_slots if sizes.shared_bytes <= shared_limit), None)


def _up(count: int, unit: int) -> int:
    return -(-count // unit) * unit


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
    """``softmax(scale * q @ k.mT) @ v`` on the current stream; keys and values are read once for 64 or 128 queries, or for a head.

    Raises:
        BackendError: sizes that ``attention_obstacle`` tells beforehand, or the kernel does not compile or launch.
    """
    obstacle = attention_obstacle(q.shape[3], mode)
    if obstacle is not None:
        raise BackendError(obstacle)
    many = 2 * q.shape[0] * q.shape[1] >= multiprocessors_of(q.device.index)
    return launch_attention(_sizes(mode, q.shape[3], q.shape[2], k.shape[2], many, q.device.index), q, k, v, scale)


def launch_attention(sizes: BlockAttention | HeadAttention, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """The same by the kernel of one's choice."""
    if scale <= 0 and isinstance(sizes, HeadAttention):  # which takes the maximum before it scales
        q, scale = q * scale, 1.0
    return attended(q, k, v, scale, partial(_launch, sizes=sizes))


def _launch(q: Tensor, k: Tensor, sizes: BlockAttention | HeadAttention) -> AttentionLaunch:
    grid, all_heads = sizes.grid(q.shape[0] * q.shape[1], q.shape[2], q.device.index)
    early = isinstance(sizes, HeadAttention)  # whose devices, of compute capability 9.0, begin early
    return AttentionLaunch(_kernel(sizes, q.device.index), grid, 32 * sizes.warps, sizes.shared_bytes, all_heads, early)


@lru_cache(maxsize=1024)
def _sizes(mode: str, head: int, queries: int, keys: int, many: bool, device_index: int) -> BlockAttention | HeadAttention:
    by_heads = None
    if many and head == HeadAttention.head and queries in _TOKENS and keys in _TOKENS and device_arch(device_index) == "sm_90a":
        by_heads = head_attention(mode, queries, keys, shared_limit_of(device_index))
    return by_heads or block_attention(mode, head, queries)


@lru_cache(maxsize=64)
def _kernel(sizes: BlockAttention | HeadAttention, device_index: int) -> Kernel:
    return load_kernel(sizes.source, sizes.defines(), name="attention", device_index=device_index)


def _fake_attention(q: Tensor, k: Tensor, v: Tensor, scale: float, mode: str) -> Tensor:
    return tokens_before_heads(q)


attention_operator = Operator("attention(Tensor q, Tensor k, Tensor v, float scale, str mode) -> Tensor", run_attention, _fake_attention)
