"""Row pitches of shared-memory tiles that avoid bank conflicts, found by counting them."""

from __future__ import annotations

from functools import lru_cache

_BANKS = 32
Accesses = tuple[tuple[int, tuple[tuple[int, int], ...]], ...]
"""For each warp-wide access its width in bytes, and each lane's row and byte offset within the row."""


Key = tuple[str, tuple[int, ...]]
"""Names a pattern of accesses."""


def reads(residue_warps: int, residues: int, interleaved: bool, element_bytes: int) -> Key:
    """What a warp of the single-factor kernel reads for 16 inputs q of rows g = lane / 4."""
    return "read", (residue_warps, residues, interleaved, element_bytes)


def writes(residue_warps: int, residues: int, element_bytes: int) -> Key:
    """What a warp of the single-factor kernel writes for a tile of 8 outputs of rows g = lane / 4."""
    return "write", (residue_warps, residues, element_bytes)


def _vectors(start: int, size: int) -> list[tuple[int, int]]:
    """(offset, width) of the accesses that cover ``size`` bytes, as ``read_words`` and ``write_words`` split them."""
    width = 16 if size % 16 == 0 else 8 if size % 8 == 0 else 4
    return [(start + offset, width) for offset in range(0, size, width)]


def _gather(lanes: list[list[tuple[int, int]]]) -> Accesses:
    steps = len(lanes[0])
    return tuple((lanes[0][s][1], tuple((lane // 4, lanes[lane][s][0]) for lane in range(32))) for s in range(steps))


def _read_accesses(residue_warps: int, residues: int, interleaved: bool, element_bytes: int) -> Accesses:
    pitch = residue_warps * residues * element_bytes
    lanes = []
    for lane in range(32):
        t = lane % 4
        if residue_warps == 1 and not interleaved:
            lanes.append(_vectors(t * 4 * pitch, 4 * residues * element_bytes))
        else:
            inputs = [t + 4 * m if interleaved else 4 * t + m for m in range(4)]
            size = -(-residues * element_bytes // 4) * 4
            lanes.append([vector for q in inputs for vector in _vectors(q * pitch, size)])
    return _gather(lanes)


def _write_accesses(residue_warps: int, residues: int, element_bytes: int) -> Accesses:
    pitch = residue_warps * residues * element_bytes
    lanes = []
    for lane in range(32):
        p = 2 * (lane % 4)
        if residue_warps == 1:
            lanes.append(_vectors(p * pitch, 2 * pitch))
        else:
            lanes.append([vector for output in (p, p + 1) for vector in _vectors(output * pitch, residues * element_bytes)])
    return _gather(lanes)


def best_pitch(row_bytes: int, key: Key) -> tuple[int, float]:
    """The shortest pitch of at least ``row_bytes`` with the fewest conflicts, and its wavefronts over the least possible."""
    base = -(-row_bytes // 16) * 16
    pad, conflicts = _best_pad(base % (4 * _BANKS) + 4 * _BANKS, key)  # with a pitch of 0 all rows would coincide
    return base + pad, conflicts


_ACCESSES = {"read": _read_accesses, "write": _write_accesses}


@lru_cache(maxsize=8192)
def _best_pad(base: int, key: Key) -> tuple[int, float]:
    kind, sizes = key
    accesses = _ACCESSES[kind](*sizes)
    conflicts, pad = min((_wavefronts(base + pad, accesses), pad) for pad in range(0, 4 * _BANKS, 16))
    return pad, conflicts


def _wavefronts(pitch: int, accesses: Accesses) -> float:
    count = 0
    least = 0.0
    for width, lanes in accesses:
        together = 32 * 4 // width
        for start in range(0, 32, together):
            words = {(row * pitch + offset) // 4 + w for row, offset in lanes[start : start + together] for w in range(width // 4)}
            banks = [0] * _BANKS
            for word in words:
                banks[word % _BANKS] += 1
            count += max(banks)
        least += len(lanes) * width / (4 * _BANKS)
    return count / least
