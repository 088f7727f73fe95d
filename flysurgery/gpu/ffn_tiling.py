"""How the kernels of whole feed-forward blocks tile two butterfly layers: sizes, tables and what they cost. Integers only."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import product
from math import ceil, log2
from typing import ClassVar, TypeVar

from flysurgery.gpu.modes import HALVES, OfMode, macros
from flysurgery.gpu.tiling import braces, registers_allowed, run_of, span_of
from flysurgery.patterns import Architecture, Pattern

ROWS_OF_WARPGROUP = 64
HIDDEN_UNIT = 3.046875
"""What the kernel for halves measures hidden units in, so that their activation takes one instruction less; its half is a bfloat16."""
OUT_UNIT = HIDDEN_UNIT / 2
"""What it measures activated units and outputs in."""
BOUND_EXPONENT = 15
"""Operands of the kernel for floats are at most this power of two, which is half of the largest power of two in fp16's range."""

_WARPGROUPS = 3
_PANEL_BYTES = 9 * 1024
_ENOUGH_SLOTS = 8  # from here on whole turns of the ring are worth more than further slots
_MAX_SLOTS = 12
_REGISTERS = 160
_REGISTERS_BESIDE_TILES = 32
_NO_TILE = 0xFFFFFFFF

_FLOAT_PANEL_BYTES = 9500  # of high or of low halves
_FLOAT_WIDTHS = (64, 48, 32, 24, 16)  # columns of a product
_MOST_OUTPUTS = 96  # of all classes, whose sums a warpgroup holds together
_FLOAT_REGISTERS_BESIDE_TILES = 48
_PRODUCER_REGISTERS = 24
_MOST_FLOAT_SLOTS = 16

Factors = tuple[Pattern, Pattern, Pattern, Pattern]
Tile = TypeVar("Tile", bound="FfnTiling")


@dataclass(frozen=True)
class FfnTiling(OfMode):
    """Sizes of ``kernels/fused_ffn.cu``, for halves, for one pair of architectures; every field but the patterns and mode is a choice.

    Attributes:
        factors: the four patterns, in the order in which x meets them.
        hidden: hidden units of a class that are activated together.
        parts: panels that a product with each factor is cut into, along its inputs.
        columns: columns of the last factor in a panel.
        slots: panels that fit in the ring.
        scaled: whether the last factor's outputs are scaled, one by one.
    """

    factors: Factors
    mode: str
    scaled: bool
    hidden: int = 16
    parts: tuple[int, int, int, int] = (1, 1, 1, 1)
    columns: int = 8
    slots: int = 2

    kernel: ClassVar[str] = "fused_ffn"
    whole_units: ClassVar[bool] = True
    """Whether rows of y past the last are written: the rows of y of a warpgroup hold what waits for its last factor."""
    neighbours: ClassVar[bool] = False
    """Whether a step has an even tile and the next one where it can: the registers of both are an operand as they are."""
    biased: ClassVar[int] = 1
    """The place of the factor whose panels have the biases of the hidden units."""

    @property
    def threads(self) -> int:
        """Threads of a block: one warpgroup brings data."""
        return 128 * (_WARPGROUPS + 1)

    @property
    def vector(self) -> int:
        """Neighbouring columns of x that a lane loads at once."""
        return 8 if self.factors[0].c % 32 == 0 else 4

    @property
    def run(self) -> int:
        """Column tiles of the last factor whose outputs a lane stores together."""
        return run_of(self.factors[3].d, self.element_bytes)

    @property
    def span(self) -> int:
        """Adjacent columns of the last factor that a lane holds."""
        return 2 * self.run

    @property
    def pieces(self) -> int:
        """Pieces of ``hidden`` units in a class and a block of the third factor."""
        return self.factors[2].c // self.factors[1].d // self.hidden

    def steps(self, place: int) -> list[list[tuple[int, int]]]:
        """For each class of the factor at a place, 1 or 3, its pairs of tiles; all of the same number, a multiple of the parts."""
        steps = class_steps(self.factors[place - 1], self.factors[place], neighbours=self.neighbours)
        longest = -(-max(map(len, steps)) // self.parts[place]) * self.parts[place]
        return [[*of_class, *[(-1, -1)] * (longest - len(of_class))] for of_class in steps]

    @property
    def panel_bytes(self) -> tuple[int, ...]:
        """Bytes of weights in a panel of each factor."""
        first, _, third, _ = self.factors
        halves = (
            first.c // self.parts[0] * 16 * tiles_of(first),
            len(self.steps(1)[0]) // self.parts[1] * 32 * self.hidden,
            self.hidden // self.parts[2] * 16 * tiles_of(third),
            len(self.steps(3)[0]) // self.parts[3] * 32 * self.columns,
        )
        return tuple(size * self.images for size in halves)

    @property
    def panel_counts(self) -> tuple[int, int, int]:
        """Panels of the first factor, of the two in the middle, of the last."""
        first, second, third, last = self.factors
        middle = third.a * second.d * self.pieces * (self.parts[1] + self.parts[2])
        return first.a * self.parts[0], middle, last.b // self.columns * last.d * self.parts[3]

    @cached_property
    def stride(self) -> int:
        """Bytes from one panel to the next, in the image and in the ring; behind weights stand biases and scales, float32."""
        sizes = [*self.panel_bytes]
        sizes[self.biased] += 4 * self.hidden
        sizes[3] += 4 * self.columns * (2 if self.scaled else 1)
        return ceil(max(sizes) / 128) * 128

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
    def held_tiles(self) -> int:
        """Tiles of u, or of v, which takes its place."""
        first, _, third, _ = self.factors
        return max(first.a * tiles_of(first), third.a * tiles_of(third))

    @cached_property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block: ring, barriers, the rows of each warpgroup."""
        buffer = max(self.held_tiles * 1024, ROWS_OF_WARPGROUP // 8 * (8 * 2 * self.factors[0].in_features + 64))
        return self.slots * (self.stride + 16) + 127 + _WARPGROUPS * (16 + buffer)

    @property
    def registers(self) -> int:
        """Registers a thread in its busiest stage, estimated."""
        first, _, third, last = self.factors
        x = first.in_features // 4 + 8 * next(n for n in range(4, 0, -1) if tiles_of(first) % n == 0)
        middle = tiles_of(third) * 4 + self.hidden * 3 // 4
        last_product = self.columns * last.d // 2 + 2 * self.run * last.d
        return max(x, middle, last_product) + _REGISTERS_BESIDE_TILES

    def defines(self, activation: str, norm: bool, residual: bool) -> dict[str, int | str]:
        """The macros that the kernel is compiled with."""
        letters = {f"{name}{n}": size for n, f in enumerate(self.factors, 1) for name, size in zip("abcd", f.factor_shape, strict=True)}
        parts = {f"parts{n}": parts for n, parts in enumerate(self.parts, 1)}
        steps = {"steps2": len(self.steps(1)[0]), "steps4": len(self.steps(3)[0])}
        tiles = {"hidden": self.hidden, "columns4": self.columns, "run": self.run, "slots": self.slots, "panel_stride": self.stride}
        options = {"mode": self.mode, "activation": activation, "norm": norm, "residual": residual, "scaled": self.scaled}
        return {**macros(**letters, **parts, **steps, **tiles, **options), **self._own_defines()}

    def _own_defines(self) -> dict[str, int | str]:
        """The macros that the other kernel does not have."""
        return {
            "WARPGROUPS": _WARPGROUPS,
            "X_VECTOR": self.vector,
            "HIDDEN_UNIT": f"{HIDDEN_UNIT}f",
            "U_TABLE": braces([_descriptor(*pair, 0) for pair in steps] for steps in self.steps(1)),
            "V_TABLE": braces([_descriptor(*pair, _NO_TILE) for pair in steps] for steps in self.steps(3)),
        }


@dataclass(frozen=True)
class FloatFfnTiling(FfnTiling):
    """Sizes of ``kernels/ffn_floats.cu``: four warps own 64 rows, four others bring weights.

    Attributes:
        warps: warps a block that multiply.
    """

    warps: int = 4

    kernel: ClassVar[str] = "ffn_floats"
    whole_units: ClassVar[bool] = False
    neighbours: ClassVar[bool] = True
    biased: ClassVar[int] = 2

    @property
    def threads(self) -> int:
        return 32 * self.warps + 128

    @property
    def most_registers(self) -> int:
        """Registers of a multiplying thread, after the threads that load weights have given up theirs."""
        groups = self.warps // 4
        return (registers_allowed(self.warps + 4) * (groups + 1) - _PRODUCER_REGISTERS) // groups // 8 * 8

    @property
    def vector(self) -> int:
        return 4

    @property
    def span(self) -> int:
        return span_of(self.run, self.factors[3].d, self.element_bytes)

    @property
    def least_slots(self) -> int:
        """One more than the panels that a warpgroup holds at once."""
        return max(self.parts[1] + self.parts[2], self.parts[3]) + 1

    @property
    def held_bytes(self) -> int:
        """The part of u or v that each warpgroup holds."""
        return self.warps // 4 * self.held_tiles * 1024

    @cached_property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block: the ring, a slot of which is a panel and two barriers, and what lies beside it."""
        return self.slots * (self.stride + 16) + self.held_bytes

    @property
    def registers(self) -> int:
        first, _, third, last = self.factors
        start = 4 * tiles_of(first) + first.c // self.parts[0]
        middle = 4 * tiles_of(third) + self.hidden
        end = self.columns * last.d // 2 + 2 * self.run * last.d
        held = 2 * self.held_tiles if self.images == 2 else 0
        return held + max(start, middle, end) + _FLOAT_REGISTERS_BESIDE_TILES

    @property
    def normalized_exponent(self) -> int:
        """The power of two that normalized rows are multiplied by. Their length is at most the root of their size."""
        return BOUND_EXPONENT - ceil(log2(self.factors[0].in_features) / 2)

    def _own_defines(self) -> dict[str, int | str]:
        return {
            "WARPS": self.warps,
            "U_TILES": braces([list(pair) for pair in steps] for steps in self.steps(1)),
            "V_TILES": braces([list(pair) for pair in steps] for steps in self.steps(3)),
            "PRODUCER_REGISTERS": _PRODUCER_REGISTERS,
            "CONSUMER_REGISTERS": self.most_registers,
            "NORMALIZED": f"{2.0**self.normalized_exponent}f",
        }


def tiles_of(factor: Pattern) -> int:
    """Column tiles of 8 that hold the outputs of one of a factor's blocks."""
    return ceil(factor.b / 8)


def block_order(factor: Pattern, block: int, classes: int) -> list[int]:
    """The outputs of one block, sorted by the class of the next factor that reads them; -1 where the tiles are not full."""
    order = sorted(range(factor.b), key=lambda p: ((block * factor.b + p) % classes, p))
    return order + [-1] * (tiles_of(factor) * 8 - factor.b)


@lru_cache(maxsize=64)
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


@lru_cache(maxsize=1024)
def ffn_tiling(up: Architecture, down: Architecture, mode: str, norm: bool, scaled: bool, shared_limit: int) -> FfnTiling | str:
    """The tiling of a feed-forward block, behind a norm or not, or the reason why no kernel takes it."""
    if mode not in HALVES and not norm:
        return "the fused FFN takes float32 behind a norm, which bounds the rows"
    if len(up) != 2 or len(down) != 2:
        return f"the fused FFN takes two factors a layer, got {up} and {down}"
    first, second, third, last = factors = (up.patterns[1], up.patterns[0], down.patterns[1], down.patterns[0])
    if first.d != 1 or third.d != 1 or second.a != 1 or last.a != 1:
        return "the fused FFN takes layers (1,b,c,d),(a,b',c',1), as the named architectures are"
    if second.out_features != third.in_features:
        return f"the second layer reads {third.in_features} features, the first one gives {second.out_features}"
    if first.c % 16 or third.c % (second.d * 16):
        return f"the fused FFN multiplies 16 columns at a time, blocks {first} and {third} with {second.d} classes do not divide so"
    if (mode in HALVES and tiles_of(third) % 2) or third.a * tiles_of(third) * 8 > last.out_features:
        return f"the {third.out_features} values between factors {third} and {last} do not fit in tiles in the rows of the result"
    if mode in HALVES:
        found = next(_fitting(FfnTiling(factors, mode, scaled), shared_limit), None)
        return found or f"no tile of {up} with {down} fits in the registers and {shared_limit} bytes of shared memory"
    fitting = _fitting_floats(FloatFfnTiling(factors, mode, scaled), shared_limit)
    found = max(fitting, key=lambda tile: (tile.warps, tile.hidden, tile.columns), default=None)
    return found or f"no tile of {up} with {down} in {mode} fits in the registers and {shared_limit} bytes of shared memory"


def _fitting(base: FfnTiling, shared_limit: int) -> Iterator[FfnTiling]:
    """Tilings that fit in the registers and in shared memory, the most promising first."""
    hidden_units, columns = _widths(base, (128, 96, 64, 48, 32, 16), (64, 48, 32, 24, 16))
    for hidden, wide in product(hidden_units, columns):
        tile = _cut(replace(base, hidden=hidden, columns=wide), _PANEL_BYTES)
        choices = range(tile.least_slots, min(max(_MAX_SLOTS, tile.least_slots), sum(tile.panel_counts) - 1) + 1)
        sizes = [size for n in choices if (size := replace(tile, slots=n)).shared_bytes <= shared_limit]
        if tile.registers <= _REGISTERS and sizes:
            enough = [size for size in sizes if size.slots >= _ENOUGH_SLOTS] or sizes[-1:]
            yield max(enough, key=lambda size: (size.whole_turns, size.slots))


def _fitting_floats(base: FloatFfnTiling, shared_limit: int) -> Iterator[FloatFfnTiling]:
    """The same for floats, in any order."""
    hidden_units, columns = _widths(base, _FLOAT_WIDTHS, _FLOAT_WIDTHS)
    columns = [n for n in columns if n * base.factors[3].d <= _MOST_OUTPUTS]
    for hidden, wide, warps in product((n for n in hidden_units if n % 16 == 0), columns, (8,) if base.images == 2 else (12, 8)):
        tile = _cut(replace(base, hidden=hidden, columns=wide, warps=warps), _FLOAT_PANEL_BYTES * base.images)
        slots = min((shared_limit - tile.held_bytes) // (tile.stride + 16), sum(tile.panel_counts), _MOST_FLOAT_SLOTS)
        if tile.registers <= tile.most_registers and slots >= tile.least_slots:
            yield replace(tile, slots=slots)


def _widths(base: FfnTiling, hidden: tuple[int, ...], columns: tuple[int, ...]) -> tuple[list[int], list[int]]:
    """Those of these numbers of hidden units, and of columns of the last factor, that divide a class and a block."""
    _, second, third, last = base.factors
    units = [n for n in hidden if third.c // second.d % n == 0]
    return units, [n for n in columns if last.b % n == 0 and n % (8 * base.run) == 0]


def _cut(tile: Tile, most: int) -> Tile:
    """Cut panels until they have ``most`` bytes, so that several fit in the ring."""
    sizes, steps = tile.panel_bytes, len(tile.steps(1)[0])
    first = next((n for n in (1, 2, 3, 4, 6, 8) if tile.factors[0].c % (16 * n) == 0 and sizes[0] // n <= most), 1)
    second = next((n for n in range(1, steps + 1) if steps % n == 0 and sizes[1] // n <= most), steps)
    third = next((n for n in (1, 2, 3, 4) if tile.hidden % (16 * n) == 0 and sizes[2] // n <= most), 1)
    last = next((n for n in (1, 2, 3, 4) if sizes[3] // n <= most), 4)
    return replace(tile, parts=(first, second, third, last))


def _descriptor(first: int, second: int, none: int) -> int:
    """Two tiles of 1 KB as part of a descriptor: the place of the first, the way to the second, in units of 16 bytes; or ``none``."""
    if first < 0:
        return none
    return 64 * first + ((second - first if second >= 0 else 0) * 64 << 16)
