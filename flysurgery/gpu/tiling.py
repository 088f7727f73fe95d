"""How the fused kernel tiles one architecture, and which configurations fit, in the order to try them. Integers only."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import accumulate, product
from math import ceil
from typing import Any

from flysurgery.gpu.modes import OfMode, macros
from flysurgery.patterns import Architecture, Pattern

_MAX_PADDING = 1.6
_MAX_PANEL_BYTES = 64 * 1024
_MAX_PANEL_COLUMNS = 128
_REGISTERS_BESIDE_TILES = 30
_REGISTERS_OF_NORM = 12
_LONG_STEPS = 12
_MANY_BLOCKS = 4
_LOPSIDED = 2


@dataclass(frozen=True)
class FusedConfig:
    """One way to run a fused layer; every field is a compile-time constant of ``kernels/fused_linear.cu``.

    Attributes:
        warps: warps a block, a multiple of four; each owns 16 rows.
        stages: batches of x that a lane has room for, one more than are loaded ahead.
        panel_steps: k16 steps of the first product in a panel of weights.
        batch: k16 steps of the first product whose operands are made ready together; one stage of x holds them.
        panel_columns: columns of the second product in a panel of weights.
        panel_classes: classes of the second product, out of those that interleave, in a panel of weights.
        slots: panels that fit in the ring; all of them where the weights stay resident.
        residues: residues of the first factor's input computed in one pass over it.
        run: column tiles whose outputs a lane stores together, so that they fill vectors.
        u_shared: what part of the intermediate lies in shared memory: 0 none, 1 all, 2 the low halves of pairs, 3 half of the groups.
        apart: a block multiplies one of the linears that share x; blocks of different linears share it in the L2 cache.
    """

    warps: int
    stages: int
    panel_steps: int
    batch: int
    panel_columns: int
    panel_classes: int
    slots: int
    residues: int
    run: int
    u_shared: int
    apart: bool = False


@dataclass(frozen=True)
class Tiling(OfMode):
    """The sizes that an architecture, a mode and a number of linears sharing x fix, whatever the configuration."""

    first: Pattern  # the factor x meets first
    second: Pattern
    mode: str
    linears: int  # that a block multiplies
    norm: bool = False  # whether a layer norm of the rows of x stands before the layer
    blocks: int = 1  # that read the same rows of x, for linears of their own
    gated: bool = False  # whether the outputs are a gate and a value, side by side in each panel, of which the product is stored

    def of(self, config: FusedConfig) -> "Tiling":
        """The sizes of a block of this configuration."""
        return replace(self, linears=1, blocks=self.linears) if config.apart and self.blocks == 1 else self

    @cached_property
    def groups(self) -> int:
        return self.first.a * self.first.d

    @cached_property
    def classes(self) -> int:
        return self.second.a * self.second.d

    @cached_property
    def straddled(self) -> bool:
        """Whether classes follow each other without padding, so that columns of two may share a tile of 8.

        Both classes then read the tile, with registers to copy: slower, so only where padding would cost more.
        """
        return self.second.a == 1 and self.classes * self._tiles * 8 > _MAX_PADDING * self.first.b

    @cached_property
    def _tiles(self) -> int:
        return ceil(max(len(m) for m in members(self.first, self.second).values()) / 8)

    @cached_property
    def group_tiles(self) -> int:
        """Column tiles of 8 of one group, for one linear."""
        return ceil(self.first.b / 8) if self.straddled else self.classes * self._tiles

    @cached_property
    def class_tiles(self) -> tuple[tuple[int, int], ...]:
        """For each class, the first tile of a group that holds columns of it and the number of such tiles, in any group."""
        starts = [self.class_starts(group) for group in range(self.groups)]
        first = [min(start[cls] for start in starts) // 8 for cls in range(self.classes)]
        past = [ceil(max(start[cls + 1] for start in starts) / 8) for cls in range(self.classes)]
        return tuple((low, high - low) for low, high in zip(first, past, strict=True))

    def class_starts(self, group: int) -> tuple[int, ...]:
        """The column of a group at which each class begins, and where the last one ends."""
        if not self.straddled:
            return tuple(8 * self._tiles * cls for cls in range(self.classes + 1))
        sizes = (len(members(self.first, self.second)[group, cls]) for cls in range(self.classes))
        return tuple(accumulate(sizes, initial=0))

    @cached_property
    def first_columns(self) -> int:
        return self.linears * self.group_tiles * 8

    @property
    def first_steps(self) -> int:
        return ceil(self.first.c / 16)

    @property
    def natural(self) -> bool:
        """Whether k runs through x in its own order, as ldmatrix reads it; otherwise a lane reads four neighbours."""
        return self.element_bytes == 2 and self.first.d == 1 and self.first.c % 8 == 0

    def stage_bytes(self, config: FusedConfig) -> int:
        """Bytes of a warp's stage of x."""
        batch = config.batch + (config.batch % 2 if self.natural else 0)
        return batch * 2 * 4 * self.first.d * self.element_bytes * 32

    @cached_property
    def second_steps(self) -> int:
        """k16 steps of the second product for the class that needs the most."""
        return max(ceil(self.groups * count / 2) for _, count in self.class_tiles)

    @property
    def runs(self) -> tuple[int, ...]:
        """Column tiles that a lane may store together: those that fill vectors of 16 bytes, or of 8."""
        return tuple(dict.fromkeys(run_of(self.second.d, self.element_bytes, vector) for vector in (16, 8)))

    @property
    def out_features(self) -> int:
        """Outputs, before a gate and a value are multiplied."""
        return self.linears * self.second.out_features

    def panel_counts(self, config: FusedConfig) -> tuple[int, int]:
        """Panels of the first and of the second product."""
        passes = self.first.d // config.residues
        return (
            self.first.a * passes * (self.first_steps // config.panel_steps),
            self.linears * self.second.a * ceil(self.second.b / config.panel_columns) * (self.second.d // config.panel_classes),
        )

    def panel_bytes(self, config: FusedConfig) -> tuple[int, int]:
        """Bytes of a panel of the first and of the second product."""
        first = config.panel_steps * config.residues * 16 * self.first_columns * 2 * self.images
        second = config.panel_classes * self.second_steps * 16 * config.panel_columns * 2 * self.images
        return first, second

    def shared_groups(self, config: FusedConfig) -> int:
        """Groups of the intermediate that lie in shared memory as a whole."""
        return (0, self.groups, 0, self.groups // 2)[config.u_shared]

    def low_groups(self, config: FusedConfig) -> int:
        """Groups of the intermediate of which the low halves of pairs lie in shared memory."""
        return self.groups if config.u_shared == 2 else 0

    def shared_bytes(self, config: FusedConfig) -> int:
        """Dynamic shared memory of a block."""
        groups = self.shared_groups(config) * self.images + self.low_groups(config)
        u = groups * self.first_columns // 8 * 256
        biases = (2 if self.norm else 1) * self.out_features * self.element_bytes
        return config.slots * (max(self.panel_bytes(config)) + 20) + config.warps * (config.stages * self.stage_bytes(config) + u) + biases

    def small_apart(self, config: FusedConfig) -> bool:
        """Whether the small products of pairs have accumulators of their own in the first product. They do where its sums are long and
        registers are left, because tensor cores truncate what each step adds to a large sum.
        """
        return self.long_sums and self._first_registers(config, 2) <= registers_allowed(config.warps)

    @property
    def long_sums(self) -> bool:
        """Whether the first product's sums are so long that float32 by pairs would lose more than float32 does."""
        return self.images == 2 and self.first_steps >= _LONG_STEPS

    def looped(self, config: FusedConfig) -> bool:
        """Whether the blocks of the first product share their code, which is long for pairs; registers must be left for all of u."""
        return self.images == 2 and self.first.a >= _MANY_BLOCKS and config.u_shared != 0

    @property
    def shares(self) -> bool:
        """Whether warpgroups share a last round of few rows: where the second product is most of the work, as each does the first."""
        first = self.groups * self.first.c * self.first_columns
        second = self.linears * self.second.out_features * self.second.c
        return self.images == 2 and second > _LOPSIDED * first

    def registers(self, config: FusedConfig) -> int:
        """Registers of a thread, estimated: accumulators, the intermediate, and all others."""
        second = self.second.d * config.panel_columns // 2
        loaded = 4 * second_batch(config) * self.images if config.u_shared else 0
        first = self._first_registers(config, 2 if self.small_apart(config) else 1)
        return max(first, self._registers_of_u(config, self.groups) + second + loaded + self._registers_beside)

    def _first_registers(self, config: FusedConfig, sums: int) -> int:
        """Registers of the first product, with this many accumulators for each output."""
        accumulators = sums * config.residues * self.first_columns // 2
        operands = config.batch * 4 * max(self.images * config.residues, self.element_bytes // 2 * self.first.d)
        before = self._registers_of_u(config, self.groups - config.residues)
        return before + accumulators + operands + self._registers_beside

    def _registers_of_u(self, config: FusedConfig, groups: int) -> int:
        """Registers of the first groups of the intermediate, given their number."""
        images = max(groups - self.shared_groups(config), 0) * self.images - min(groups, self.low_groups(config))
        return self.first_columns // 8 * 2 * images

    @property
    def _registers_beside(self) -> int:
        return _REGISTERS_BESIDE_TILES + (_REGISTERS_OF_NORM if self.norm else 0)

    def defines(self, config: FusedConfig) -> dict[str, int | str]:
        """The macros that the kernel is compiled with, less the activation."""
        patterns = ((1, self.second), (2, self.first))
        letters = {f"{letter}{n}": size for n, pattern in patterns for letter, size in zip("ABCD", pattern.factor_shape, strict=True)}
        first, count = (braces(sizes) for sizes in zip(*self.class_tiles, strict=True))
        chosen = macros(
            config,
            mode=self.mode,
            groups=self.linears,
            group_tiles=self.group_tiles,
            ksteps1=self.first_steps,
            steps2=second_batch(config),
            small_apart=self.small_apart(config),
            looped=self.looped(config),
            shares=self.shares,
            u_groups=self.shared_groups(config),
            u_low=self.low_groups(config),
            norm=self.norm,
            blocks=self.blocks,
            gated=self.gated,
        )
        return {**letters, "CLASS_FROM": first, "CLASS_TILES": count, **chosen}


def run_of(d: int, element_bytes: int, vector: int = 16) -> int:
    """How many column tiles of 8 a lane stores together, so that its two columns of each, of d residues, fill vectors of so many bytes."""
    return next(run for run in (1, 2, 4, 8) if 2 * run * d * element_bytes % vector == 0)


def span_of(run: int, d: int, element_bytes: int) -> int:
    """Adjacent columns that a lane then holds: those of one vector, which lanes take in turn, or all of its own."""
    vector = (16 if 2 * run * d * element_bytes % 16 == 0 else 8) // element_bytes
    return vector // d if vector % d == 0 else 2 * run


def braces(values: Iterable[Any]) -> str:
    """Integers, or nested lists of them, as the initializer of an array in C."""
    return "{" + ",".join(braces(value) if isinstance(value, list) else str(value) for value in values) + "}"


def second_batch(config: FusedConfig) -> int:
    """Steps of the second product read from shared memory together."""
    return 2 if config.warps > 8 else 6


@lru_cache(maxsize=256)
def members(first: Pattern, second: Pattern) -> dict[tuple[int, int], tuple[int, ...]]:
    """Inner indices of each (group of the first factor, class of the second), ascending; empty ones left out."""
    found: dict[tuple[int, int], list[int]] = {}
    for m in range(first.out_features):
        group = m // (first.b * first.d) * first.d + m % first.d
        cls = m // (second.c * second.d) * second.d + m % second.d
        found.setdefault((group, cls), []).append(m)
    return {key: tuple(values) for key, values in found.items()}


def registers_allowed(warps: int) -> int:
    """Registers a thread may use: each quarter of a multiprocessor shares 16384 among its warps."""
    return min(255, 16384 // (32 * ceil(warps / 4)) // 8 * 8)


def tiling(architecture: Architecture, mode: str, linears: int = 1, *, norm: bool = False, gated: bool = False) -> Tiling | str:
    """The tiling of an architecture, or the reason why the fused kernel has none."""
    if len(architecture) != 2:
        return f"the fused kernel multiplies two factors, this architecture has {len(architecture)}"
    second, first = architecture.patterns
    result = Tiling(first, second, mode, linears, norm, gated=gated)
    if first.c % 4:
        return f"the fused kernel reads 4 columns of a class at a time, pattern {first} has c = {first.c}"
    if len(members(first, second)) < result.groups * result.classes:
        return f"patterns {second} and {first} leave blocks of rank 0, which the fused kernel does not tile"
    padding = result.groups * result.group_tiles * 8 / first.out_features
    if padding > _MAX_PADDING:
        return f"tiles of 8 would pad the inner size {first.out_features} by a factor of {padding:.2f}"
    if norm and first.c % 16:
        return f"the fused kernel takes the norm of rows in steps of 16 columns of a class, pattern {first} has c = {first.c}"
    if gated and (linears > 1 or second.a > 1 or second.b % 2):
        return (
            f"the fused kernel takes a gate and a value that are the halves of one layer's outputs, with a = 1 and an even b, got {second}"
        )
    ragged = first.in_features * result.element_bytes % 16 or second.b * second.d * result.element_bytes % 16
    if ragged or second.b % (2 * result.runs[-1]):
        return f"rows of {first.in_features} and blocks of {second.b}x{second.d} features do not fill 16-byte vectors in mode {mode}"
    return result


@lru_cache(maxsize=1024)
def configs(tile: Tiling, shared_limit: int) -> tuple[FusedConfig, ...]:
    """Configurations that fit in ``shared_limit`` bytes and the registers, the most promising first; a dozen at most."""
    return tuple(sorted(every_config(tile, shared_limit), key=lambda config: _cost(tile.of(config), config))[:12])


def every_config(tile: Tiling, shared_limit: int) -> Iterator[FusedConfig]:
    """All configurations to consider: for a block that multiplies all linears, and for blocks that multiply one each."""
    yield from _configs_of(tile, shared_limit)
    if tile.linears > 1:
        yield from _configs_of(replace(tile, linears=1, blocks=tile.linears), shared_limit)


def _configs_of(tile: Tiling, shared_limit: int) -> Iterator[FusedConfig]:
    steps = [n for n in range(1, tile.first_steps + 1) if tile.first_steps % n == 0]
    residues = [n for n in range(1, tile.first.d + 1) if tile.first.d % n == 0]
    placements = [n for n in (0, 1, 2, 3) if (n != 2 or tile.images == 2) and (n != 3 or tile.groups > 1)]
    for warps, u_shared, run, step, residue in product((4, 8, 12, 16), placements, tile.runs, steps, residues):
        batches = [n for n in range(1, max(4 // residue, 1) + 1) if step % n == 0]
        for panel_columns, panel_classes, batch in product(_panel_columns(tile, run), {1, tile.second.d}, batches):
            sizes = (step, batch, panel_columns, panel_classes, 2, residue, run, u_shared)
            config = FusedConfig(warps, 3, *sizes, apart=tile.blocks > 1)
            first, second = tile.panel_bytes(config)
            lopsided = max(first, second) > 8 * min(first, second) or max(first, second) > _MAX_PANEL_BYTES
            if lopsided or tile.second.b % (2 * run) or tile.registers(config) > registers_allowed(warps):
                continue
            yield from _fill(tile, config, shared_limit)


def _panel_columns(tile: Tiling, run: int) -> list[int]:
    """Columns of a panel of the second product: they divide its width, or just exceed it where nothing is gated."""
    unit = 8 * run * (2 if tile.gated else 1)
    found = [n for n in range(unit, _MAX_PANEL_COLUMNS + 1, unit) if tile.second.b % n == 0]
    return found if found or tile.gated else [unit]


def _fill(tile: Tiling, config: FusedConfig, shared_limit: int) -> Iterator[FusedConfig]:
    """Spend the shared memory: all panels if they fit, or a ring of them; then as many stages of x as fit."""
    panels = sum(tile.panel_counts(config))
    for slots in sorted({panels, *(n for n in (2, 3, 4, 6) if n < panels)}):
        filled = (replace(config, slots=slots, stages=stages) for stages in (6, 4, 3, 2))
        found = next((each for each in filled if _holds(tile, each, shared_limit)), None)
        if found is not None:
            yield found


def _holds(tile: Tiling, config: FusedConfig, shared_limit: int) -> bool:
    # with few rows at a time a launch of its own for the norm is faster
    return (config.warps >= 8 or not tile.norm) and tile.shared_bytes(config) <= shared_limit


def fits(tile: Tiling, config: FusedConfig, shared_limit: int) -> bool:
    """Whether a configuration, such as one out of a table, is of the kind that ``every_config`` gives."""
    if config.apart and tile.linears == 1:
        return False
    tile = tile.of(config)
    return (
        tile.first_steps % config.panel_steps == 0
        and config.panel_steps % config.batch == 0
        and tile.first.d % config.residues == 0
        and config.run in tile.runs
        and tile.second.b % (2 * config.run) == 0
        and config.panel_columns in _panel_columns(tile, config.run)
        and config.panel_classes in (1, tile.second.d)
        and config.u_shared in ((0, 1, 2, 3) if tile.images == 2 else (0, 1, 3))
        and config.warps % 4 == 0
        and 2 <= config.slots <= sum(tile.panel_counts(config))
        and config.stages >= 2
        and tile.registers(config) <= registers_allowed(config.warps)
        and _holds(tile, config, shared_limit)
    )


def _cost(tile: Tiling, config: FusedConfig) -> float:
    """The relative cost of a configuration without a measurement: a sum of penalties, fitted to times on an H200 at 25088 rows."""
    warps = config.warps
    in_flight = warps * (config.stages - 1) * config.batch * 256 * tile.first.d * tile.element_bytes
    spare = registers_allowed(warps) - tile.registers(config)
    return sum(
        (
            5.2 / config.panel_columns,  # tensor cores wait between narrow products
            0.95 if warps < 8 else 0.18 if warps < 12 else 0.0 if warps == 12 else 0.13,
            (0.0, 0.3, 0.01, 0.1)[config.u_shared],
            0.03 if config.slots < 4 else 0.0,
            0.07 / config.batch,
            0.14 * max(0.0, 1.0 - in_flight / 34_000),
            0.002 * max(0, 33 - spare),  # spills
            0.04 if config.run == 1 else 0.0,
            10.0 if tile.long_sums and not tile.small_apart(config) else 0.0,  # less exact
            0.38 * (tile.first.d / config.residues - 1),
            0.02 / config.panel_steps,
            0.25 if config.apart else 0.0,
            0.08 if config.u_shared == 0 and config.panel_classes < tile.second.d else 0.0,  # waits more often
        )
    )
