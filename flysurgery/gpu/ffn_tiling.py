"""How the fused feed-forward kernel tiles two butterfly layers: sizes, tables and what they cost. Integers only."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil
from typing import ClassVar, TypeVar

from flysurgery.gpu.modes import macros
from flysurgery.gpu.tiling import braces
from flysurgery.patterns import Architecture, Pattern

WARPGROUPS = 3
ROWS_OF_WARPGROUP = 64
HIDDEN_UNIT = 3.046875
"""What the kernel for halves measures hidden units in, so that their activation takes one instruction less; its half is a bfloat16."""
OUT_UNIT = HIDDEN_UNIT / 2
"""What it measures activated units and outputs in."""
_PANEL_BYTES = 9 * 1024
_ENOUGH_SLOTS = 8  # from here on whole turns of the ring are worth more than further slots
_MAX_SLOTS = 12
_REGISTERS = 160
_REGISTERS_BESIDE_TILES = 32
_NO_TILE = 0xFFFFFFFF

Factors = tuple[Pattern, Pattern, Pattern, Pattern]
Tile = TypeVar("Tile", bound="FfnTiling")


@dataclass(frozen=True)
class FfnTiling:
    """Sizes of ``kernels/fused_ffn.cu`` for one pair of architectures; every field but the patterns is a choice.

    Attributes:
        factors: the four patterns, in the order in which x meets them.
        hidden: hidden units of a class that are activated together.
        parts: panels that a product with each factor is cut into, along its inputs.
        columns: columns of the last factor in a panel.
        slots: panels that fit in the ring.
        scaled: whether the last factor's outputs are scaled, one by one.
    """

    factors: Factors
    hidden: int
    parts: tuple[int, int, int, int]
    columns: int
    slots: int
    scaled: bool

    kernel: ClassVar[str] = "fused_ffn"
    whole_units: ClassVar[bool] = True
    """Whether rows of y past the last are written: the rows of y of a warpgroup hold what waits for its last factor."""
    neighbours: ClassVar[bool] = False
    """Whether a step has an even tile and the next one where it can: the registers of both are an operand as they are."""

    @property
    def threads(self) -> int:
        """Threads of a block: one warpgroup brings data."""
        return 128 * (WARPGROUPS + 1)

    @property
    def vector(self) -> int:
        """Neighbouring columns of x that a lane loads at once."""
        return 8 if self.factors[0].c % 32 == 0 else 4

    @property
    def run(self) -> int:
        """Column tiles of the last factor whose outputs a lane stores together, to fill vectors of 16 bytes."""
        return next(run for run in (1, 2, 4) if run * self.factors[3].d % 4 == 0)

    @property
    def span(self) -> int:
        """Adjacent columns of the last factor that a lane holds."""
        return 2 * self.run

    @property
    def pieces(self) -> int:
        """Pieces of ``hidden`` units in a class and a block of the third factor."""
        return self.factors[2].c // self.factors[1].d // self.hidden

    @property
    def middle_steps(self) -> list[list[tuple[int, int]]]:
        """For each class of the second factor, its pairs of tiles; all of the same number, a multiple of the parts."""
        return self._steps(1)

    @property
    def last_steps(self) -> list[list[tuple[int, int]]]:
        return self._steps(3)

    def _steps(self, place: int) -> list[list[tuple[int, int]]]:
        steps = class_steps(self.factors[place - 1], self.factors[place], neighbours=self.neighbours)
        longest = -(-max(map(len, steps)) // self.parts[place]) * self.parts[place]
        return [[*of_class, *[(-1, -1)] * (longest - len(of_class))] for of_class in steps]

    @property
    def panel_bytes(self) -> tuple[int, int, int, int]:
        """Bytes of weights in a panel of each factor."""
        first, _, third, _ = self.factors
        return (
            first.c // self.parts[0] * 16 * tiles_of(first),
            len(self.middle_steps[0]) // self.parts[1] * 32 * self.hidden,
            self.hidden // self.parts[2] * 16 * tiles_of(third),
            len(self.last_steps[0]) // self.parts[3] * 32 * self.columns,
        )

    @property
    def panel_counts(self) -> tuple[int, int, int]:
        """Panels of the first factor, of the two in the middle, of the last."""
        first, second, third, last = self.factors
        middle = third.a * second.d * self.pieces * (self.parts[1] + self.parts[2])
        return first.a * self.parts[0], middle, last.b // self.columns * last.d * self.parts[3]

    @property
    def stride(self) -> int:
        """Bytes from one panel to the next, in the image and in the ring."""
        first, second, third, last = self.panel_bytes
        floats = 4 * self.columns * (2 if self.scaled else 1)
        return ceil(max(first, second + 4 * self.hidden, third, last + floats) / 128) * 128

    @property
    def least_slots(self) -> int:
        """Panels that a warpgroup holds at once."""
        return max(2 * self.parts[0], 2 + self.parts[2])

    @property
    def whole_turns(self) -> bool:
        """Whether a round's panels, and those of a block of the third factor, fill the ring some whole times: slots are constants then."""
        first, middle, last = self.panel_counts
        return (first + middle + last) % self.slots == 0 and middle // self.factors[2].a % self.slots == 0

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block: ring, barriers, the rows of each warpgroup."""
        first, _, third, _ = self.factors
        tiles = max(first.a * tiles_of(first), third.a * tiles_of(third))
        buffer = max(tiles * 1024, ROWS_OF_WARPGROUP // 8 * (8 * 2 * first.in_features + 64))
        return self.slots * (self.stride + 16) + 127 + WARPGROUPS * (16 + buffer)

    @property
    def registers(self) -> int:
        """Registers a thread in its busiest stage, estimated."""
        first, _, third, last = self.factors
        x = first.in_features // 4 + 8 * next(n for n in range(4, 0, -1) if tiles_of(first) % n == 0)
        middle = tiles_of(third) * 4 + self.hidden * 3 // 4
        last_product = self.columns * last.d // 2 + 2 * self.run * last.d
        return max(x, middle, last_product) + _REGISTERS_BESIDE_TILES

    def sizes(self) -> dict[str, int | str]:
        """The macros that all feed-forward kernels are compiled with."""
        letters = {f"{name}{n}": size for n, f in enumerate(self.factors, 1) for name, size in zip("abcd", f.factor_shape, strict=True)}
        parts = {f"parts{n}": parts for n, parts in enumerate(self.parts, 1)}
        steps = {"steps2": len(self.middle_steps[0]), "steps4": len(self.last_steps[0])}
        tiles = {"hidden": self.hidden, "columns4": self.columns, "run": self.run, "slots": self.slots, "panel_stride": self.stride}
        return {**macros(scaled=self.scaled, **letters, **parts, **steps, **tiles)}

    def defines(self) -> dict[str, int | str]:
        """The macros that the kernel is compiled with, less mode, activation, norm and residual."""
        middle = [[_descriptor(*pair) if pair[0] >= 0 else 0 for pair in steps] for steps in self.middle_steps]
        last = [[_descriptor(*pair) if pair[0] >= 0 else _NO_TILE for pair in steps] for steps in self.last_steps]
        return {
            **self.sizes(),
            "WARPGROUPS": WARPGROUPS,
            "X_VECTOR": self.vector,
            "HIDDEN_UNIT": f"{HIDDEN_UNIT}f",
            "U_TABLE": braces(middle),
            "V_TABLE": braces(last),
        }


def tiles_of(factor: Pattern) -> int:
    """Column tiles of 8 that hold the outputs of one of a factor's blocks."""
    return ceil(factor.b / 8)


def block_order(factor: Pattern, block: int, classes: int) -> list[int]:
    """The outputs of one block, sorted by the class of the next factor that reads them; -1 where the tiles are not full."""
    order = sorted(range(factor.b), key=lambda p: ((block * factor.b + p) % classes, p))
    return order + [-1] * (tiles_of(factor) * 8 - factor.b)


def class_steps(factor: Pattern, reader: Pattern, *, neighbours: bool = False) -> list[list[tuple[int, int]]]:
    """For each class of ``reader``, the tiles of ``factor``'s outputs that hold some of it, two a k16 step; -1 for none.

    ``neighbours``: an even tile and the next one are a step where the class has both, and what is left comes after these.
    """
    found = []
    for cls in range(reader.d):
        tiles = []
        for block in range(factor.a):
            order = block_order(factor, block, reader.d)
            for tile in range(tiles_of(factor)):
                held = order[8 * tile : 8 * tile + 8]
                if any(p >= 0 and (block * factor.b + p) % reader.d == cls for p in held):
                    tiles.append(block * tiles_of(factor) + tile)
        whole = [(tile, tile + 1) for tile in tiles if neighbours and tile % 2 == 0 and tile + 1 in tiles]
        left = [tile for tile in tiles if not any(tile in pair for pair in whole)]
        left += [-1] * (len(left) % 2)
        found.append([*whole, *zip(left[::2], left[1::2], strict=True)])
    return found


@lru_cache(maxsize=256)
def ffn_tiling(up: Architecture, down: Architecture, shared_limit: int, *, scaled: bool) -> FfnTiling | str:
    """The tiling of a feed-forward block, or the reason why the kernel has none."""
    factors = factors_of(up, down)
    if isinstance(factors, str):
        return factors
    third, last = factors[2:]
    if tiles_of(third) % 2 or third.a * tiles_of(third) * 8 > last.out_features:
        return f"the {third.out_features} values between factors {third} and {last} do not fit in tiles in the rows of the result"
    fitting = [*_fitting(factors, shared_limit, scaled)]
    if not fitting:
        return f"no tile of {up} with {down} fits in the registers and {shared_limit} bytes of shared memory"
    return fitting[0]


def factors_of(up: Architecture, down: Architecture) -> Factors | str:
    """The four patterns, in the order in which x meets them, or the reason why the kernels of whole blocks do not take them."""
    if len(up) != 2 or len(down) != 2:
        return f"the fused FFN takes two factors a layer, got {up} and {down}"
    first, second, third, last = factors = (up.patterns[1], up.patterns[0], down.patterns[1], down.patterns[0])
    if first.d != 1 or third.d != 1 or second.a != 1 or last.a != 1:
        return "the fused FFN takes layers (1,b,c,d),(a,b',c',1), as the named architectures are"
    if second.out_features != third.in_features:
        return f"the second layer reads {third.in_features} features, the first one gives {second.out_features}"
    if first.c % 16 or third.c % (second.d * 16):
        return f"the fused FFN multiplies 16 columns at a time, blocks {first} and {third} with {second.d} classes do not divide so"
    return factors


def _fitting(factors: Factors, shared_limit: int, scaled: bool) -> list[FfnTiling]:
    """Tilings that fit in the registers and in shared memory, the most promising first."""
    _, second, third, last = factors
    share = third.c // second.d
    base = FfnTiling(factors, 16, (1, 1, 1, 1), 8, 2, scaled)
    unit = 8 * base.run
    found = []
    for hidden in (n for n in (128, 96, 64, 48, 32, 16) if share % n == 0):
        for columns in (n for n in (64, 48, 32, 24, 16) if last.b % n == 0 and n % unit == 0):
            tile = cut(replace(base, hidden=hidden, columns=columns), _PANEL_BYTES)
            choices = range(tile.least_slots, min(max(_MAX_SLOTS, tile.least_slots), sum(tile.panel_counts) - 1) + 1)
            sizes = [size for n in choices if (size := replace(tile, slots=n)).shared_bytes <= shared_limit]
            if tile.registers <= _REGISTERS and sizes:
                enough = [size for size in sizes if size.slots >= _ENOUGH_SLOTS] or sizes[-1:]
                found.append(max(enough, key=lambda size: (size.whole_turns, size.slots)))
    return found


def cut(tile: Tile, most: int) -> Tile:
    """Cut panels until they have ``most`` bytes, so that several fit in the ring."""
    first = next((n for n in (1, 2, 3, 4, 6, 8) if tile.factors[0].c % (16 * n) == 0 and tile.panel_bytes[0] // n <= most), 1)
    steps = len(tile.middle_steps[0])
    second = next((n for n in range(1, steps + 1) if steps % n == 0 and tile.panel_bytes[1] // n <= most), steps)
    third = next((n for n in (1, 2, 3, 4) if tile.hidden % (16 * n) == 0 and tile.panel_bytes[2] // n <= most), 1)
    last = next((n for n in (1, 2, 3, 4) if tile.panel_bytes[3] // n <= most), 4)
    return replace(tile, parts=(first, second, third, last))


def _descriptor(first: int, second: int) -> int:
    """Two tiles of 1 KB as part of a descriptor: the place of the first, the way to the second, in units of 16 bytes."""
    return 64 * first + ((second - first if second >= 0 else 0) * 64 << 16)
