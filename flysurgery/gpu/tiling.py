"""How the fused kernel tiles one architecture: sizes, and what a configuration makes of them. Integers only."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import accumulate
from math import ceil
from typing import Any

from flysurgery.gpu.modes import OfMode, macros
from flysurgery.patterns import Architecture, Pattern

_MAX_PADDING = 1.6
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

    def of(self, config: FusedConfig) -> Tiling:
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
        if not self.straddled:
            return tuple((cls * self._tiles, self._tiles) for cls in range(self.classes))
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
        whole = next(r for r in (1, 2, 4, 8) if 2 * r * self.second.d * self.element_bytes % 16 == 0)
        half = next(r for r in (1, 2, 4, 8) if 2 * r * self.second.d * self.element_bytes % 8 == 0)
        return tuple(dict.fromkeys((whole, half)))

    @property
    def in_features(self) -> int:
        return self.first.in_features

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

    def span(self, config: FusedConfig) -> int:
        """Adjacent columns of the second product that a lane holds."""
        run_bytes = 2 * config.run * self.second.d * self.element_bytes
        vector = (16 if run_bytes % 16 == 0 else 8) // self.element_bytes
        return vector // self.second.d if vector % self.second.d == 0 else 2 * config.run

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
    ragged = result.in_features * result.element_bytes % 16 or second.b * second.d * result.element_bytes % 16
    if ragged or second.b % (2 * result.runs[-1]):
        return f"rows of {result.in_features} and blocks of {second.b}x{second.d} features do not fill 16-byte vectors in mode {mode}"
    return result
