"""How the fused kernel tiles one architecture: sizes, configurations and what they cost. Integers only."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from math import ceil

from flysurgery.patterns import Architecture, Pattern

MODES = ("fp16", "bf16", "tf32", "fp32")
_MAX_PANEL_BYTES = 64 * 1024
_MAX_PANEL_COLUMNS = 128
_MAX_PADDING = 1.6
_REGISTERS_BESIDE_TILES = 30


@dataclass(frozen=True)
class FusedConfig:
    """One way to run a fused layer; every field is a compile-time constant of ``kernels/fused_linear.cu``.

    Attributes:
        warps: warps a block, each owning its rows.
        row_tiles: tiles of 16 rows a warp owns.
        stages: batches of x that a lane has room for, one more than are loaded ahead.
        panel_steps: k16 steps of the first product in a panel of weights.
        panel_columns: columns of the second product in a panel of weights.
        slots: panels that fit in the ring; all of them where the weights stay resident.
        residues: residues of the first factor's input computed in one pass over it.
        run: column tiles whose outputs a lane stores together, so that they fill vectors.
        u_shared: what part of the intermediate lies in shared memory: 0 none, 1 all, 2 the low halves of pairs.
        wgmma: products by warpgroups, sm_90a only.
    """

    wgmma: bool
    warps: int
    row_tiles: int
    stages: int
    panel_steps: int
    panel_columns: int
    slots: int
    residues: int
    run: int
    u_shared: int


@dataclass(frozen=True)
class Tiling:
    """The sizes that an architecture, a mode and a number of linears sharing x fix, whatever the configuration."""

    first: Pattern  # the factor x meets first
    second: Pattern
    mode: str
    linears: int

    @property
    def element_bytes(self) -> int:
        return 4 if self.mode in ("tf32", "fp32") else 2

    @property
    def images(self) -> int:
        """Images of the weights: hi and lo where fp32 is split in pairs."""
        return 2 if self.mode == "fp32" else 1

    @property
    def groups(self) -> int:
        return self.first.a * self.first.d

    @property
    def classes(self) -> int:
        return self.second.a * self.second.d

    @property
    def tiles(self) -> int:
        """Column tiles of 8 that hold one group's share of one class."""
        return ceil(max(len(m) for m in members(self.first, self.second).values()) / 8)

    @property
    def first_columns(self) -> int:
        return self.linears * self.classes * self.tiles * 8

    @property
    def first_steps(self) -> int:
        return ceil(self.first.c / 16)

    @property
    def natural(self) -> bool:
        """Whether k runs through x in its own order, as ldmatrix reads it; otherwise a lane reads four neighbours."""
        return self.element_bytes == 2 and self.first.d == 1 and self.first.c % 8 == 0

    @property
    def second_steps(self) -> int:
        return ceil(self.groups * self.tiles / 2)

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
        return self.linears * self.second.out_features

    def panel_counts(self, config: FusedConfig) -> tuple[int, int]:
        """Panels of the first and of the second product."""
        passes = self.first.d // config.residues
        return (
            self.first.a * passes * (self.first_steps // config.panel_steps),
            self.linears * self.second.a * ceil(self.second.b / config.panel_columns),
        )

    def panel_bytes(self, config: FusedConfig) -> tuple[int, int]:
        """Bytes of a panel of the first and of the second product."""
        first = config.panel_steps * config.residues * 16 * self.first_columns * 2 * self.images
        second = self.second.d * self.second_steps * 16 * config.panel_columns * 2 * self.images
        return first, second

    def shared_bytes(self, config: FusedConfig) -> int:
        """Dynamic shared memory of a block."""
        batch = self.batch(config) + (self.batch(config) % 2 if self.natural else 0)
        stage = batch * config.row_tiles * 2 * 4 * self.first.d * self.element_bytes * 32
        images = (0, self.images, 1)[config.u_shared]
        u = self.linears * self.classes * self.second_steps * config.row_tiles * 512 * images
        bias = self.out_features * self.element_bytes
        return config.slots * (max(self.panel_bytes(config)) + 12) + config.warps * (config.stages * stage + u) + bias

    def span(self, config: FusedConfig) -> int:
        """Adjacent columns of the second product that a lane holds."""
        run_bytes = 2 * config.run * self.second.d * self.element_bytes
        vector = (16 if run_bytes % 16 == 0 else 8) // self.element_bytes
        return vector // self.second.d if vector % self.second.d == 0 else 2 * config.run

    def batch(self, config: FusedConfig) -> int:
        """Steps of the first product whose operands are made ready together."""
        return max(n for n in range(1, max(4 // config.residues, 1) + 1) if config.panel_steps % n == 0)

    def registers(self, config: FusedConfig) -> int:
        """Registers a thread, estimated: accumulators and the intermediate, and what stands beside them."""
        images = (self.images, 0, 1)[config.u_shared]
        u = self.linears * self.classes * self.second_steps * 4 * config.row_tiles * images
        first = config.residues * config.row_tiles * self.first_columns // 2
        second = self.second.d * config.row_tiles * config.panel_columns // 2
        operands = self.batch(config) * config.row_tiles * 4 * max(self.images * config.residues, self.element_bytes // 2 * self.first.d)
        turns = self.groups // config.residues
        return max(u * (turns - 1) // turns + first + operands, u + second + (24 if config.u_shared else 0)) + _REGISTERS_BESIDE_TILES

    def defines(self, config: FusedConfig) -> dict[str, int]:
        """The macros that the kernel is compiled with, less the activation."""
        first, second = self.first, self.second
        return {
            "A1": second.a,
            "B1": second.b,
            "C1": second.c,
            "D1": second.d,
            "A2": first.a,
            "B2": first.b,
            "C2": first.c,
            "D2": first.d,
            "GROUPS": self.linears,
            "MODE": MODES.index(self.mode),
            "TILES": self.tiles,
            "KSTEPS1": self.first_steps,
            "WGMMA": int(config.wgmma),
            "RUN": config.run,
            "WARPS": config.warps,
            "MT": config.row_tiles,
            "STAGES": config.stages,
            "PANEL_STEPS": config.panel_steps,
            "PANEL_COLUMNS": config.panel_columns,
            "SLOTS": config.slots,
            "RESIDUES": config.residues,
            "U_SHARED": config.u_shared,
        }


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


def tiling(architecture: Architecture, mode: str, linears: int = 1) -> Tiling | str:
    """The tiling of an architecture, or the reason why the fused kernel has none."""
    if len(architecture) != 2:
        return f"the fused kernel multiplies two factors, this architecture has {len(architecture)}"
    if mode not in MODES:
        return f"the fused kernel has no mode '{mode}', only {', '.join(MODES)}"
    second, first = architecture.patterns
    result = Tiling(first, second, mode, linears)
    if first.c % 4:
        return f"the fused kernel reads 4 columns of a class at a time, pattern {first} has c = {first.c}"
    if len(members(first, second)) < result.groups * result.classes:
        return f"patterns {second} and {first} leave blocks of rank 0, which the fused kernel does not tile"
    padding = result.groups * result.classes * result.tiles * 8 / first.out_features
    if padding > _MAX_PADDING:
        return f"tiles of 8 would pad the inner size {first.out_features} by a factor of {padding:.2f}"
    ragged = result.in_features * result.element_bytes % 16 or second.b * second.d * result.element_bytes % 16
    if ragged or second.b % (2 * result.runs[-1]):
        return f"rows of {result.in_features} and blocks of {second.b}x{second.d} features do not fill 16-byte vectors in mode {mode}"
    return result


def configs(tile: Tiling, shared_limit: int, *, wgmma: bool) -> list[FusedConfig]:
    """Configurations that fit in ``shared_limit`` bytes and the registers, the most promising first; a dozen at most."""
    return sorted(every_config(tile, shared_limit, wgmma=wgmma), key=lambda config: _cost(tile, config))[:12]


def every_config(tile: Tiling, shared_limit: int, *, wgmma: bool) -> Iterator[FusedConfig]:
    """All configurations worth a thought."""
    steps = [n for n in range(1, tile.first_steps + 1) if tile.first_steps % n == 0]
    residues = [n for n in range(1, tile.first.d + 1) if tile.first.d % n == 0]
    units = [(True, warps, 1) for warps in (4, 8, 12, 16)] if wgmma else []
    units += [(False, warps, row_tiles) for warps in (4, 6, 8, 12, 16) for row_tiles in (1, 2)]
    placements = (0, 1, 2) if tile.images == 2 else (0, 1)
    for (by_group, warps, row_tiles), u_shared, run, step, residue in product(units, placements, tile.runs, steps, residues):
        for panel_columns in _panel_columns(tile, run):
            config = FusedConfig(by_group, warps, row_tiles, 3, step, panel_columns, 2, residue, run, u_shared)
            first, second = tile.panel_bytes(config)
            lopsided = max(first, second) > 8 * min(first, second) or max(first, second) > _MAX_PANEL_BYTES
            if lopsided or tile.second.b % (2 * run) or tile.registers(config) > registers_allowed(warps):
                continue
            yield from _fill(tile, config, shared_limit)


def _panel_columns(tile: Tiling, run: int) -> list[int]:
    """Columns of a panel of the second product: they divide its width, or just exceed it."""
    unit = 8 * run
    found = [n for n in range(unit, _MAX_PANEL_COLUMNS + 1, unit) if tile.second.b % n == 0]
    return found or [unit]


def _fill(tile: Tiling, config: FusedConfig, shared_limit: int) -> Iterator[FusedConfig]:
    """Spend the shared memory: all panels if they fit, or a ring of them; then as many stages of x as fit."""
    panels = sum(tile.panel_counts(config))
    for slots in sorted({panels, *(n for n in (2, 3, 4, 6) if n < panels)}):
        for stages in (6, 4, 3, 2):
            filled = replace(config, slots=slots, stages=stages)
            if tile.shared_bytes(filled) <= shared_limit:
                yield filled
                break


def fits(tile: Tiling, config: FusedConfig, shared_limit: int, *, wgmma: bool) -> bool:
    """Whether a configuration, such as one out of a table, is one of ``every_config``."""
    return config in every_config(tile, shared_limit, wgmma=wgmma)


def _cost(tile: Tiling, config: FusedConfig) -> float:
    """Relative cost where nothing was measured: a sum of penalties, fitted to timings on an H200 at 25088 rows."""
    warps = config.warps * config.row_tiles
    batch = tile.batch(config)
    in_flight = config.warps * (config.stages - 1) * batch * config.row_tiles * 256 * tile.first.d * tile.element_bytes
    spare = registers_allowed(config.warps) - tile.registers(config)
    return sum(
        (
            5.2 / config.panel_columns,  # narrow products leave the tensor cores waiting
            0.0 if config.wgmma else 0.25,
            0.95 if warps < 8 else 0.18 if warps < 12 else 0.0 if warps == 12 else 0.13,
            (0.0, 0.3, 0.01)[config.u_shared],
            0.03 if config.slots < 4 else 0.0,
            0.07 / batch,
            0.14 * max(0.0, 1.0 - in_flight / 34_000),
            0.002 * max(0, 33 - spare),  # spills
            0.04 if config.run == 1 else 0.0,
            0.38 * (tile.first.d / config.residues - 1),
            0.02 / config.panel_steps,
        )
    )
