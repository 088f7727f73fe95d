"""Sizes of the attention kernels whose blocks stay and take head after head through a ring in shared memory (sm_90a)."""

from __future__ import annotations

from dataclasses import dataclass

from flysurgery.gpu.modes import HALVES, MODE_NUMBERS

_HEAD = 64
_MOST_CHUNK = {"fp16": 208, "bf16": 208, "tf32": 208, "fp32": 112}
"""Keys whose scores a thread holds at once. More would leave too few registers."""
_SLOTS = {"fp16": range(24, 4, -1), "bf16": range(24, 4, -1), "tf32": range(8, 2, -1), "fp32": range(8, 2, -1)}
_BATCH = {"tf32": 13, "fp32": 8}
"""Pieces of rows on their way to a thread that brings, the faster of 4, 8 and 13."""
_MOST_LAST = 8
_FEWEST_TILES = 3
"""With separate last queries: a warpgroup that has multiplied such a tile takes another tile before its next one of these."""


@dataclass(frozen=True)
class RingAttention:
    """Sizes of ``short_attention.cu`` for halves, ``attention.cu`` for float32, with heads of 64 features.

    Attributes:
        mode: ``fp16``, ``bf16``, ``tf32`` or ``fp32``.
        chunk: keys whose scores a thread has at once.
        chunks: of a sequence.
        rows: of a slot, which holds the queries, the keys or the values of a head.
        tiles: of 64 queries.
        slots: of the ring.
        last: whether the last tile has so few queries that they are multiplied apart; halves only.
    """

    mode: str
    chunk: int
    chunks: int
    rows: int
    tiles: int
    slots: int
    last: bool

    threads = 32 * 16

    @property
    def name(self) -> str:
        """The kernel's name, and its file's without the ending."""
        return "short_attention" if self.mode in HALVES else "attention"

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block: the ring, its barriers, and what the last tile reads beyond it or its warps exchange.

        Of float32 also maxima and exponents of rows.
        """
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
        return self.rows // -(-self.rows // 256) if self.mode in HALVES else 0

    def defines(self) -> dict[str, int]:
        """The macros that the kernel is compiled with."""
        own = {"LAST": int(self.last)} if self.mode in HALVES else {"BATCH": _BATCH[self.mode]}
        sizes = {"CHUNK": self.chunk, "CHUNKS": self.chunks, "ROWS": self.rows, "TILES": self.tiles, "SLOTS": self.slots}
        return {"MODE": MODE_NUMBERS[self.mode], **sizes, **own}


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


def _up(count: int, unit: int) -> int:
    return -(-count // unit) * unit
