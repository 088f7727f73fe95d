"""Which configurations of the fused kernel fit a tiling, and in which order to try them. Integers only."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from flysurgery.gpu.tiling import FusedConfig, Tiling, registers_allowed

_MAX_PANEL_BYTES = 64 * 1024
_MAX_PANEL_COLUMNS = 128


def configs(tile: Tiling, shared_limit: int) -> list[FusedConfig]:
    """Configurations that fit in ``shared_limit`` bytes and the registers, the most promising first; a dozen at most."""
    return sorted(every_config(tile, shared_limit), key=lambda config: _cost(tile.of(config), config))[:12]


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
        for panel_columns, panel_classes, batch in product(_panel_columns(tile, run), {1, tile.second.d}, _batches(step, residue)):
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


def _batches(panel_steps: int, residues: int) -> list[int]:
    return [n for n in range(1, max(4 // residues, 1) + 1) if panel_steps % n == 0]


def _fill(tile: Tiling, config: FusedConfig, shared_limit: int) -> Iterator[FusedConfig]:
    """Spend the shared memory: all panels if they fit, or a ring of them; then as many stages of x as fit."""
    panels = sum(tile.panel_counts(config))
    for slots in sorted({panels, *(n for n in (2, 3, 4, 6) if n < panels)}):
        filled = (replace(config, slots=slots, stages=stages) for stages in (6, 4, 3, 2))
        found = next((each for each in filled if _holds(tile, each, shared_limit)), None)
        if found is not None:
            yield found


def _holds(tile: Tiling, config: FusedConfig, shared_limit: int) -> bool:
    if tile.norm and config.warps < 8:
        return False  # with few rows at a time a launch of its own for the norm is faster
    return config.stages >= 2 and tile.shared_bytes(config) <= shared_limit


def fits(tile: Tiling, config: FusedConfig, shared_limit: int) -> bool:
    """Whether a configuration, such as one out of a table, is one that ``every_config`` could give."""
    if config.apart and tile.linears == 1:
        return False
    tile = tile.of(config)
    first, second = tile.first, tile.second
    whole = tile.first_steps % config.panel_steps == 0 and config.panel_steps % config.batch == 0 and first.d % config.residues == 0
    whole = whole and config.panel_columns % (8 * config.run) == 0 and second.b % (2 * config.run) == 0 and config.run in tile.runs
    whole = whole and config.panel_columns in _panel_columns(tile, config.run) and config.panel_classes in (1, second.d)
    placed = config.u_shared in ((0, 1, 2, 3) if tile.images == 2 else (0, 1, 3))
    if not (whole and placed and config.warps % 4 == 0 and 2 <= config.slots <= sum(tile.panel_counts(config))):
        return False
    return tile.registers(config) <= registers_allowed(config.warps) and _holds(tile, config, shared_limit)


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
