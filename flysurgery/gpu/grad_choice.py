"""Configurations of the factor-gradient kernel for one pattern, by an estimate of what each costs. Integers only."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from math import ceil

from flysurgery.gpu.grad_tiling import GradConfig, GradTiling
from flysurgery.gpu.modes import TENSOR_CORE_MODES
from flysurgery.gpu.search import most_promising
from flysurgery.patterns import Pattern


@lru_cache(maxsize=512)
def grad_configs(pattern: Pattern, mode: str, shared_limit: int) -> tuple[GradConfig, ...]:
    """Configurations that fit, the most promising first; a dozen at most."""
    return most_promising(
        _enumerate(pattern, mode),
        lambda config: _fill(GradTiling(pattern, mode, config), shared_limit),
        lambda config: _cost(GradTiling(pattern, mode, config)),
    )


def _enumerate(pattern: Pattern, mode: str) -> Iterator[GradConfig]:
    width = 2 if mode in ("fp16", "bf16") else 4
    for residues, residue_warps, neighbours in _residues(pattern.d, width):
        for output_tiles in (1, 2, 4):
            for input_tiles in (1, 2, 4, 8):
                if output_tiles * input_tiles * residues > 32 or (2 * output_tiles) % neighbours or input_tiles % neighbours:
                    continue
                for output_warps in (1, 2, 4):
                    for input_warps in (1, 2, 4):
                        config = GradConfig(
                            output_warps, input_warps, residue_warps, output_tiles, input_tiles, residues, neighbours, 16, 2, 1
                        )
                        smaller = (config.block_outputs // 2, config.block_inputs // 2)
                        wasteful = (smaller[0] >= pattern.b and output_warps > 1) or (smaller[1] >= pattern.c and input_warps > 1)
                        if not wasteful and config.threads <= 512:
                            yield config


def _residues(d: int, width: int) -> Iterator[tuple[int, int, int]]:
    """(residues a warp, warps along residues, neighbouring features a lane) worth trying."""
    sector = 32 // width
    blocks = {block for block in (16, 12, 8, 4) if block < d and d % block == 0}
    if not any(block >= sector for block in blocks):
        blocks.add(min(d, sector))  # the last range is padded where this does not divide d
    if d <= 16:
        blocks.add(d)
    if d > 8 and d % 4:
        blocks.add(8)
    for block in blocks:
        for each in (1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 13, 15):
            if block % each or block // each > 8:
                continue
            if each == block:
                yield each, 1, 1 if each * width % 4 == 0 else 2  # a lane reads whole words
            elif each * width % 4 == 0:
                yield each, block // each, 1


def _fill(tile: GradTiling, shared_limit: int) -> GradConfig | None:
    config = tile.config
    if tile.registers > 255:
        return None
    by_registers = 65536 // (ceil(tile.registers / 8) * 8 * config.threads)
    for blocks in range(min(by_registers, 3, 2048 // config.threads), 0, -1):
        for chunk, stages in ((64, 3), (32, 4), (32, 3), (16, 4), (16, 3), (16, 2)):
            filled = replace(config, chunk=chunk, stages=stages, min_blocks=blocks)
            shared = GradTiling(tile.pattern, tile.mode, filled).shared_bytes
            if shared <= shared_limit and (shared + 1024) * blocks <= shared_limit + 1024:
                return filled
    return None


def _cost(tile: GradTiling) -> float:
    """Estimated clock cycles of one multiprocessor for 25088 rows, on a Hopper GPU."""
    config, width, pattern = tile.config, tile.element_bytes, tile.pattern
    splits, each = tile.splits(25088, 132)
    features = (config.block_outputs + config.block_inputs) * config.block_residues
    products = config.block_outputs * config.block_inputs * config.block_residues * config.chunk
    arithmetic = products / {"fp16": 1150, "bf16": 1150, "tf32": 575, "fp32": 192}[tile.mode]
    sector = 1.0 if config.block_residues == pattern.d else max(1.0, 32 / (config.block_residues * width))
    l2 = features * config.chunk * width * sector / 16
    reads = config.block_outputs * config.input_warps + config.block_inputs * config.output_warps
    shared = (reads * config.block_residues + features) * config.chunk * width / 128
    warps = config.threads / 32
    copies = 6 * features * config.chunk * width / (16 * config.threads) + 40
    rate = min(0.8, 0.18 * warps * config.min_blocks / 4)  # instructions a clock of a scheduler: few warps do not hide latency
    issue = (_step_instructions(tile) * config.chunk / (16 if width == 2 else 8) + copies) * warps / 4 / rate
    parts = (arithmetic, l2, shared, issue)
    waves = ceil(tile.groups * splits / (132 * config.min_blocks)) * config.min_blocks
    partial = 0 if splits == 1 else 2 * splits * pattern.nnz * 4 / 132 / 6
    return waves * each * (max(parts) + 0.05 * sum(parts)) + partial


def _step_instructions(tile: GradTiling) -> float:
    """Instructions of a warp for the rows of one product: reads, separation of residues or splitting of floats, products."""
    config, width = tile.config, tile.element_bytes
    tiles = (2 * config.output_tiles + config.input_tiles) * config.residues  # of eight features
    products = config.output_tiles * config.input_tiles * config.residues
    if width == 2 and config.block_residues == 1:
        reads = tiles / 2
    else:
        words = config.neighbours * config.residues * width // 4
        loads = words / (4 if words % 4 == 0 else 2 if words % 2 == 0 else 1)
        groups = tiles / (config.neighbours * config.residues)
        convert = {"fp16": 2, "bf16": 2, "tf32": 2, "fp32": 14}[tile.mode]
        reads = groups * loads * (4 if width == 2 else 2) + tiles * convert
    return 1.1 * (reads + products * (7 if tile.mode == "fp32" else 1)) + 8


def grad_reason(pattern: Pattern, mode: str, shared_limit: int) -> str | None:
    """Why the factor-gradient kernel cannot run a pattern, or None where it can. Modes: ``fp16``, ``bf16``, ``tf32``, ``fp32``."""
    if mode not in TENSOR_CORE_MODES:
        return f"the factor-gradient kernel has no mode '{mode}', only {', '.join(TENSOR_CORE_MODES)}"
    if not grad_configs(pattern, mode, shared_limit):
        return f"no tile of the gradient of pattern {pattern} in mode {mode} fits in {shared_limit} bytes of shared memory"
    return None
