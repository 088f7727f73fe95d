"""Scaled dot-product attention of float32 on tensor cores (sm_90a), with its registered operator."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache, partial

from torch import Tensor

from flysurgery.errors import BackendError
from flysurgery.gpu.attended import AttentionLaunch, attended, tokens_before_heads
from flysurgery.gpu.kernel import Kernel, load_kernel
from flysurgery.gpu.modes import MODE_NUMBERS
from flysurgery.gpu.obstacles import multiprocessors_of, shared_limit_of
from flysurgery.gpu.registered import Operator


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

    def defines(self) -> dict[str, int]:
        """The macros that the kernel is compiled with."""
        sizes = {"CHUNK": self.chunk, "CHUNKS": self.chunks, "ROWS": self.rows, "TILES": self.tiles, "SLOTS": self.slots}
        return {"MODE": MODE_NUMBERS[self.mode], **sizes, "BATCH": _BATCH[self.mode]}


_MOST_CHUNK = {"tf32": 208, "fp32": 112}
"""Keys whose scores a thread holds at once. More would leave too few registers."""
_BATCH = {"tf32": 13, "fp32": 8}
"""Pieces of rows on their way to a thread that brings, the faster of 4, 8 and 13."""


def head_attention(head: int, queries: int, keys: int, mode: str, shared_limit: int) -> HeadAttention | str:
    """The sizes for heads of so many features, queries and keys, or the reason why the kernel takes none."""
    if mode not in _BATCH:
        return f"the attention kernel has the modes {', '.join(_BATCH)}, not '{mode}'"
    if head != HeadAttention.head:
        return f"the attention kernel takes heads of {HeadAttention.head} features, got {head}"
    chunks = -(-keys // _MOST_CHUNK[mode])
    chunk = _up(-(-keys // chunks), 16)
    rows = max(chunk * chunks, _up(queries, 16))
    for slots in HeadAttention.slot_counts:
        sizes = HeadAttention(mode, chunk, chunks, rows, -(-queries // 64), slots)
        if sizes.shared_bytes <= shared_limit:
            return sizes
    return f"{queries} queries and {keys} keys of {head} floats exceed {shared_limit} bytes of shared memory"


_sizes = lru_cache(maxsize=1024)(head_attention)


def _up(count: int, unit: int) -> int:
    return -(-count // unit) * unit


def attention_obstacle(head: int, queries: int, keys: int, mode: str, shared_limit: int) -> str | None:
    """Why the kernel takes no heads of so many features, queries and keys; None where it does."""
    sizes = head_attention(head, queries, keys, mode, shared_limit)
    return sizes if isinstance(sizes, str) else None


def run_attention(
    q: Tensor,  # shape: (batch, heads, queries, head)
    k: Tensor,  # shape: (batch, heads, keys, head)
    v: Tensor,  # shape: (batch, heads, keys, head)
    scale: float,
    mode: str,
) -> Tensor:  # shape: (batch, heads, queries, head), tokens before heads in memory
    """``softmax(scale * q @ k.mT) @ v`` on the current stream; keys and values are read once.

    Raises:
        BackendError: sizes that ``attention_obstacle`` tells beforehand, or the kernel does not compile or launch.
    """
    sizes = _sizes(q.shape[3], q.shape[2], k.shape[2], mode, shared_limit_of(q.device.index))
    if isinstance(sizes, str):
        raise BackendError(sizes)
    if scale <= 0:  # the kernel takes the maximum before it scales
        q, scale = q * scale, 1.0
    return attended(q, k, v, scale, partial(_launch, sizes=sizes))


def _launch(q: Tensor, k: Tensor, sizes: HeadAttention) -> AttentionLaunch:
    heads = q.shape[0] * q.shape[1]
    grid = (min(heads, multiprocessors_of(q.device.index)), 1, 1)
    return AttentionLaunch(_kernel(sizes, q.device.index), grid, 32 * sizes.warps, sizes.shared_bytes, (heads,), early=True)


@lru_cache(maxsize=64)
def _kernel(sizes: HeadAttention, device_index: int) -> Kernel:
    return load_kernel(sizes.source, sizes.defines(), name="attention", device_index=device_index)


attention_operator = Operator(
    "attention(Tensor q, Tensor k, Tensor v, float scale, str mode) -> Tensor", run_attention, lambda q, given: tokens_before_heads(q)
)
