"""How the feed-forward kernel for float32 tiles two butterfly layers: sizes and what they cost. Integers only."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from math import ceil, log2
from typing import ClassVar

from flysurgery.gpu.ffn_tiling import Factors, FfnTiling, cut, factors_of, tiles_of
from flysurgery.gpu.modes import OfMode
from flysurgery.gpu.tiling import braces, registers_allowed
from flysurgery.patterns import Architecture

HEADER_BYTES = 128
BOUND_EXPONENT = 15
"""Operands are at most this power of two, which is half of the largest power of two in fp16's range."""

_PANEL_BYTES = 9500  # of high or of low halves
_WIDTHS = (64, 48, 32, 24, 16)  # columns of a product
_MOST_OUTPUTS = 96  # of all classes, whose sums a warpgroup holds together
_REGISTERS_BESIDE_TILES = 48
_PRODUCER_REGISTERS = 24
_MOST_SLOTS = 16


@dataclass(frozen=True)
class FloatFfnTiling(OfMode, FfnTiling):
    """Sizes of ``kernels/ffn_floats.cu`` for one pair of architectures and one mode; four warps own 64 rows, four others bring weights.

    Attributes:
        warps: warps a block that multiply.
        mode: ``"fp32"`` or ``"tf32"``.
    """

    warps: int
    mode: str

    kernel: ClassVar[str] = "ffn_floats"
    whole_units: ClassVar[bool] = False
    neighbours: ClassVar[bool] = True

    @property
    def threads(self) -> int:
        return 32 * self.warps + 128

    @property
    def most_registers(self) -> int:
        """Registers of a multiplying thread, after the threads that load weights have given up theirs."""
        groups = self.warps // 4
        return (registers_allowed(self.warps + 4) * (groups + 1) - _PRODUCER_REGISTERS) // groups // 8 * 8

    @property
    def slot_bytes(self) -> int:
        """What a slot takes in shared memory: a panel and two barriers."""
        return self.stride + 16

    @property
    def vector(self) -> int:
        return 4

    @property
    def run(self) -> int:
        return 1 if self.factors[3].d % 2 == 0 else 2

    @property
    def span(self) -> int:
        whole = 4 % self.factors[3].d == 0  # a vector of outputs holds whole columns: then lanes take vectors in turn
        return 4 // self.factors[3].d if whole else 2 * self.run

    @property
    def panel_bytes(self) -> tuple[int, int, int, int]:
        first, second, third, last = super().panel_bytes
        return first * self.images, second * self.images, third * self.images, last * self.images

    @property
    def stride(self) -> int:
        first, second, third, last = self.panel_bytes
        floats = 4 * self.columns * (2 if self.scaled else 1)
        return ceil(max(first, second, third + 4 * self.hidden, last + floats) / 128) * 128

    @property
    def least_slots(self) -> int:
        """One more than the panels that a warpgroup holds at once."""
        return max(self.parts[1] + self.parts[2], self.parts[3]) + 1

    @property
    def held_tiles(self) -> int:
        """Tiles of u, or of v, which takes its place."""
        first, _, third, _ = self.factors
        return max(first.a * tiles_of(first), third.a * tiles_of(third))

    @property
    def held_bytes(self) -> int:
        """The part of u or v that each warpgroup holds."""
        return self.warps // 4 * self.held_tiles * 1024

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block: the ring and what lies beside it."""
        return self.slots * self.slot_bytes + self.held_bytes

    @property
    def registers(self) -> int:
        first, _, third, last = self.factors
        start = 4 * tiles_of(first) + first.c // self.parts[0]
        middle = 4 * tiles_of(third) + self.hidden
        end = self.columns * last.d // 2 + 2 * self.run * last.d
        held = 2 * self.held_tiles if self.images == 2 else 0
        return held + max(start, middle, end) + _REGISTERS_BESIDE_TILES

    @property
    def normalized_exponent(self) -> int:
        """The power of two that normalized rows are multiplied by. Their length is at most the root of their size."""
        return BOUND_EXPONENT - ceil(log2(self.factors[0].in_features) / 2)

    def defines(self) -> dict[str, int | str]:
        middle, last = ([[list(pair) for pair in steps] for steps in each] for each in (self.middle_steps, self.last_steps))
        return {
            **self.sizes(),
            "WARPS": self.warps,
            "U_TILES": braces(middle),
            "V_TILES": braces(last),
            "PRODUCER_REGISTERS": _PRODUCER_REGISTERS,
            "CONSUMER_REGISTERS": self.most_registers,
            "NORMALIZED": f"{2.0**self.normalized_exponent}f",
        }


@lru_cache(maxsize=256)
def float_ffn_tiling(up: Architecture, down: Architecture, mode: str, shared_limit: int, *, scaled: bool) -> FloatFfnTiling | str:
    """The tiling of a feed-forward block, or the reason why the kernel has none."""
    factors = factors_of(up, down)
    if isinstance(factors, str):
        return factors
    third, last = factors[2:]
    if third.a * tiles_of(third) * 8 > last.out_features:
        return f"the {third.out_features} values between factors {third} and {last} do not fit in tiles in the rows of the result"
    fitting = _fitting(factors, mode, shared_limit, scaled)
    found = max(fitting, key=lambda tile: (tile.warps, tile.hidden, tile.columns), default=None)
    return found or f"no tile of {up} with {down} in {mode} fits in the registers and {shared_limit} bytes of shared memory"


def _fitting(factors: Factors, mode: str, shared_limit: int, scaled: bool) -> Iterator[FloatFfnTiling]:
    """Tilings that fit in the registers and in shared memory."""
    _, second, third, last = factors
    base = FloatFfnTiling(factors, 16, (1, 1, 1, 1), 8, 0, scaled, 4, mode)
    hidden_units = (n for n in _WIDTHS if third.c // second.d % n == 0 and n % 16 == 0)
    columns = [n for n in _WIDTHS if last.b % n == 0 and n % (8 * base.run) == 0 and n * last.d <= _MOST_OUTPUTS]
    for hidden, wide, warps in product(hidden_units, columns, (8,) if base.images == 2 else (12, 8)):
        tile = cut(replace(base, hidden=hidden, columns=wide, warps=warps), _PANEL_BYTES * base.images)
        slots = min((shared_limit - tile.held_bytes) // tile.slot_bytes, sum(tile.panel_counts), _MOST_SLOTS)
        if tile.registers <= tile.most_registers and slots >= tile.least_slots:
            yield replace(tile, slots=slots)
