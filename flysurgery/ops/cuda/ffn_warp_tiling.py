"""How the feed-forward kernel without wgmma tiles two butterfly layers: sizes and what they cost. Integers only."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from math import ceil

from flysurgery.ops.cuda.ffn_ring_tiling import RingFfnTiling, fastest, filled
from flysurgery.ops.cuda.ffn_tiling import Factors, factors_of, tiles_of
from flysurgery.patterns import Architecture

_LEAST_SLOTS = 3
_MOST_OUTPUTS = 128
_REGISTERS_BESIDE_TILES = 34


@dataclass(frozen=True)
class WarpFfnTiling(RingFfnTiling):
    """Sizes of ``kernels/ffn_warps.cu`` for one pair of architectures; a warp owns 16 rows.

    Only products with the first factor are cut into parts.
    """

    @property
    def kernel(self) -> str:
        return "ffn_warps"

    @property
    def unit_rows(self) -> int:
        return 16

    @property
    def units(self) -> tuple[float, float, float]:
        return 2.0, 2.0, 1.0

    @property
    def joined(self) -> bool:
        return True

    @property
    def panel_counts(self) -> tuple[int, int, int]:
        first, second, third, last = self.factors
        return first.a * self.parts[0], third.a * second.d * self.pieces, last.b // self.columns * last.d

    @property
    def stride(self) -> int:
        first, _, _, last = self.panel_bytes
        floats = 4 * self.columns * (2 if self.scaled else 1)
        return ceil(max(first, self.middle_bytes, last + floats) / 128) * 128

    @property
    def middle_bytes(self) -> int:
        """Bytes of a panel of the middle: weights of a piece in both factors, its biases between them."""
        _, second, third, _ = self.panel_bytes
        return second + 4 * self.hidden + third

    @property
    def least_slots(self) -> int:
        return _LEAST_SLOTS

    @property
    def held_bytes(self) -> int:
        """What waits for the last factor of each warp."""
        third = self.factors[2]
        return self.warps * (third.a - 1) * tiles_of(third) * 256

    @property
    def registers(self) -> int:
        first, _, third, last = self.factors
        u, v = 2 * first.a * tiles_of(first), 2 * third.a * tiles_of(third)
        start = max(first.in_features // 4, u) + 4 * tiles_of(first)
        middle = u + 4 * tiles_of(third) + self.hidden // 2
        end = v + self.columns * last.d // 2 + 2 * self.run * last.d
        return max(start, middle, end) + _REGISTERS_BESIDE_TILES

    def defines(self) -> dict[str, int | str]:
        return {**super().defines(), "X_VECTOR": self.vector, "PARTS1": self.parts[0]}


@lru_cache(maxsize=256)
def warp_ffn_tiling(up: Architecture, down: Architecture, shared_limit: int, *, scaled: bool) -> WarpFfnTiling | str:
    """The tiling of a feed-forward block, or the reason why the kernel has none."""
    factors = factors_of(up, down)
    if isinstance(factors, str):
        return factors
    found = fastest(_fitting(factors, shared_limit, scaled))
    return found or f"no tile of {up} with {down} fits in the registers and {shared_limit} bytes of shared memory"


def _fitting(factors: Factors, shared_limit: int, scaled: bool) -> Iterator[WarpFfnTiling]:
    """Tilings that fit in the registers and in shared memory. Narrower pieces or fewer warps were slower than a launch a layer."""
    first, second, third, last = factors
    base = WarpFfnTiling(factors, 16, (1, 1, 1, 1), 8, _LEAST_SLOTS, scaled, 1)
    hidden_units = [n for n in range(32, 97, 16) if third.c // second.d % n == 0]
    columns = [n for n in range(8 * base.run, 129, 8 * base.run) if last.b % n == 0 and n * last.d <= _MOST_OUTPUTS]
    for hidden, wide, warps in product(hidden_units, columns, (12, 8, 6)):
        tile = replace(base, hidden=hidden, columns=wide, warps=warps)
        cuts = (n for n in range(1, first.c // 16 + 1) if first.c // 16 % n == 0 and tile.panel_bytes[0] // n <= tile.middle_bytes)
        fitting = filled(replace(tile, parts=(next(cuts, first.c // 16), 1, 1, 1)), shared_limit)
        if fitting is not None:
            yield fitting
