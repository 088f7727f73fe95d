"""Configurations of the single-factor kernel for one pattern, by an estimate of what each costs. Integers only."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from math import ceil

from flysurgery.gpu.single_tiling import SingleConfig, SingleTiling
from flysurgery.patterns import Pattern

_PLANNED_ROWS = 25088
_MAX_BLOCKS = 4
_CANDIDATES = 12
_DRAM_ACCESS = 64


@lru_cache(maxsize=4096)
def candidates(pattern: Pattern, mode: str, shared_limit: int) -> tuple[SingleConfig, ...]:
    """Configurations that fit, the most promising first; a dozen at most."""
    filled = [_fill(SingleTiling(pattern, mode, config), shared_limit) for config in _enumerate(pattern, mode)]
    fitting = [config for config in filled if config is not None]
    return tuple(sorted(fitting, key=lambda config: _cost(SingleTiling(pattern, mode, config)))[:_CANDIDATES])


def _enumerate(pattern: Pattern, mode: str) -> Iterator[SingleConfig]:
    width = 2 if mode in ("fp16", "bf16") else 4
    chunks = {min(chunk, ceil(pattern.c / 16) * 16) for chunk in (16, 32, 48, 64, 96, 128, 192)}
    for residues, residue_warps, chunk in _residues(pattern.d, width, chunks):
        for row_tiles in (1, 2, 4) if residues == 1 else (1, 2):
            for output_tiles in (1, 2, 3, 4, 6, 8, 12, 16):
                if row_tiles * residues * output_tiles > 32:
                    continue
                for output_warps in (1, 2, 4):
                    if output_warps * output_tiles * 8 >= pattern.b + max(8 * output_warps, pattern.b // 4 // 8 * 8):
                        continue
                    for row_warps in (1, 2, 4, 8):
                        if 4 <= row_warps * output_warps * residue_warps <= 16:
                            yield SingleConfig(
                                row_warps, output_warps, residue_warps, row_tiles, output_tiles, residues, chunk, 2, True, False, 1
                            )


def _residues(d: int, width: int, chunks: set[int]) -> Iterator[tuple[int, int, int]]:
    """(residues a warp, warps along residues, chunk) worth trying: whole sectors of 32 bytes, or all residues at once."""
    sector = 32 // width
    blocks = {block for block in (32, 24, 16, 12, 8, 4) if block < d and d % block == 0}
    if not any(block >= sector for block in blocks):
        blocks.add(min(d, sector))  # the last range is padded where this does not divide d
    if d <= 16:
        blocks.add(d)
    for block in blocks:
        for each in (1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 13, 15):
            if block % each or block // each > 8 or (block > each and (each * width) % 4):
                continue
            for chunk in chunks:
                yield each, block // each, chunk


def _fill(tile: SingleTiling, shared_limit: int) -> SingleConfig | None:
    """Choose the reading order, keep the weights in shared memory if they fit, and use the rest for blocks and stages."""
    config = tile.config
    if (config.residues * tile.element_bytes) % 4 == 0:
        other = SingleTiling(tile.pattern, tile.mode, replace(config, interleaved=True))
        if other.read_conflicts < tile.read_conflicts or config.residue_warps > 1:
            tile, config = other, other.config
    by_registers = 65536 // (ceil(tile.registers / 8) * 8 * config.threads)
    if by_registers == 0 or tile.registers > 255:
        return None
    for resident in (True, False):
        fixed, stage = tile.shared_parts(resident)
        for blocks in range(min(by_registers, _MAX_BLOCKS, 2048 // config.threads), 0, -1):
            room = (shared_limit + 1024) // blocks - 1024
            for stages in (4, 3, 2):
                if fixed + stages * stage <= room:
                    return replace(config, stages=stages, resident=resident, min_blocks=blocks)
    return None


def _cost(tile: SingleTiling) -> float:
    """Estimated clock cycles of one multiprocessor for the planned rows, on a Hopper GPU."""
    pattern, config, width = tile.pattern, tile.config, tile.element_bytes
    _, output_tiles, chunks = tile.counts
    inputs = chunks * config.chunk
    x_elements = config.block_rows * inputs * config.block_residues
    y_elements = config.block_rows * config.block_outputs * config.block_residues
    weights = chunks * tile.weight_chunk_bytes
    row_chunks, each = tile.row_chunks(_PLANNED_ROWS, 132)
    sector = 1.0 if config.block_residues == pattern.d else max(1.0, 32 / (config.block_residues * width))
    streamed = weights / each if config.resident else weights
    products = y_elements * inputs
    arithmetic = products * (3 if tile.images == 2 else 1) / 2048 * 1.6
    per_element = {2: 0.5, 4: 3.5 if tile.images == 1 else 5.0}[width]
    issue = (x_elements * config.output_warps * per_element + products / 512 * (4 if tile.images == 2 else 1) * 32) / 128
    shared = (
        x_elements * width * (1 + config.output_warps * tile.read_conflicts)
        + streamed
        + weights * config.row_warps
        + 2 * y_elements * width
    ) / 128
    l2 = (x_elements * width * sector + streamed + y_elements * width) / 26
    line = 1.0 if tile.counts[0] == tile.ranges_fast else max(1.0, _DRAM_ACCESS / (config.block_residues * tile.ranges_fast * width))
    memory = (x_elements / output_tiles + y_elements) * width * line / 18.7
    parts = (arithmetic, issue, shared, l2, memory)
    idle = (120 * chunks + 400 + 0.3 * y_elements * width / 26) / config.min_blocks
    per_tile = max(parts) + 0.15 * sum(parts) + idle
    slots = 132 * config.min_blocks
    waves = ceil(tile.groups * row_chunks / slots)
    return waves * each * config.min_blocks * per_tile


def single_reason(pattern: Pattern, mode: str, shared_limit: int) -> str | None:
    """Why the single-factor kernel cannot run a pattern, or None where it can.

    Args:
        mode: ``fp16``, ``bf16``, ``tf32`` or ``fp32``.
        shared_limit: bytes of shared memory that a block may use on the device.
    """
    if not candidates(pattern, mode, shared_limit):
        return f"no tile of pattern {pattern} in mode {mode} fits in {shared_limit} bytes of shared memory"
    return None
