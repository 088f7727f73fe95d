"""How the feed-forward kernel for float32 tiles two butterfly layers: sizes and what they cost. Integers only."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from math import ceil, log2

from flysurgery.ops.cuda.ffn_ring_tiling import RingFfnTiling, fastest, filled
from flysurgery.ops.cuda.ffn_tiling import Factors, cut, factors_of, tiles_of
from flysurgery.ops.cuda.tiling import registers_allowed
from flysurgery.patterns import Architecture

HEADER_BYTES = 128
BOUND_EXPONENT = 15
"""Operands are at most this power of two, half of the largest in fp16's range."""

_PANEL_BYTES = 9500  # of high or of low halves
_WIDTHS = (64, 48, 32, 24, 16)  # columns of a product
_MOST_OUTPUTS = 96  # of all classes, whose sums a warpgroup holds together
_REGISTERS_BESIDE_TILES = 48
_PRODUCER_REGISTERS = 24


@dataclass(frozen=True)
class FloatFfnTiling(RingFfnTiling):
    """Sizes of ``kernels/ffn_floats.cu`` for one pair of architectures and one mode; four warps own 64 rows, four others bring weights.

    Attributes:
        mode: ``"fp32"`` or ``"tf32"``.
    """

    mode: str

    @property
    def kernel(self) -> str:
        return "ffn_floats"

    @property
    def threads(self) -> int:
        return 32 * self.warps + 128

    @property
    def most_registers(self) -> int:
        """Registers a thread that multiplies, when those that bring weights have left theirs."""
        groups = self.warps // 4
        return (registers_allowed(self.warps + 4) * (groups + 1) - _PRODUCER_REGISTERS) // groups // 8 * 8

    @property
    def slot_bytes(self) -> int:
        """What a slot takes in shared memory: a panel and two barriers."""
        return self.stride + 16

    @property
    def neighbours(self) -> bool:
        return True

    @property
    def images(self) -> int:
        """Halves that make an operand."""
        return 2 if self.mode == "fp32" else 1

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
        """What each warpgroup holds of u or v."""
        return self.warps // 4 * self.held_tiles * 1024

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
        """By this power of two normalized rows are multiplied, which are no longer than the root of their size."""
        return BOUND_EXPONENT - ceil(log2(self.factors[0].in_features) / 2)

    def defines(self) -> dict[str, int | str]:
        return {
            **super().defines(),
            "MT": 1,
            "WGMMA": 1,
            "PRODUCER_REGISTERS": _PRODUCER_REGISTERS,
            "CONSUMER_REGISTERS": self.most_registers,
            **{f"PARTS{n}": parts for n, parts in enumerate(self.parts, 1)},
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
    found = fastest(_fitting(factors, mode, shared_limit, scaled))
    return found or f"no tile of {up} with {down} in {mode} fits in the registers and {shared_limit} bytes of shared memory"


def _fitting(factors: Factors, mode: str, shared_limit: int, scaled: bool) -> Iterator[FloatFfnTiling]:
    """Tilings that fit in the registers and in shared memory."""
    _, second, third, last = factors
    base = FloatFfnTiling(factors, 16, (1, 1, 1, 1), 8, 0, scaled, 4, mode)
    hidden_units = (n for n in _WIDTHS if third.c // second.d % n == 0 and n % 16 == 0)
    columns = [n for n in _WIDTHS if last.b % n == 0 and n % (8 * base.run) == 0 and n * last.d <= _MOST_OUTPUTS]
    for hidden, wide, warps in product(hidden_units, columns, (8,) if base.images == 2 else (12, 8)):
        tile = filled(cut(replace(base, hidden=hidden, columns=wide, warps=warps), _PANEL_BYTES * base.images), shared_limit)
        if tile is not None:
            yield tile
