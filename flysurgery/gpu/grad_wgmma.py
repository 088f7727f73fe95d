"""How the factor-gradient kernel of Hopper GPUs tiles one pattern, and which configurations to time. Integers only."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import ceil

from flysurgery.gpu.grad_tiling import splits_of
from flysurgery.gpu.modes import HALVES
from flysurgery.gpu.pattern_macros import pattern_macros
from flysurgery.gpu.search import most_promising
from flysurgery.patterns import Pattern

ALIGNMENT = 16
"""Bytes: where rows of x and dy must begin."""
_MOST_RESIDUES = 4
"""The most residues. The arithmetic grows with them, so for more the kernel that separates them is expected to be faster."""
_REGISTERS_BESIDE_SUMS = 26
_ROWS, _MULTIPROCESSORS = 25088, 132
_BYTES_PER_US, _FLOPS_PER_US = 4e4, 5e6
"""Of one multiprocessor."""
_CHUNK_US, _LATENCY_US = 0.1, 0.8
"""The time of a chunk besides its products, and the latency of a copy."""


@dataclass(frozen=True)
class WgmmaGradConfig:
    """One way to run a factor gradient; every field is a compile-time constant of ``kernels/factor_grad_wgmma.cu``.

    Attributes:
        output_groups: warpgroups a block, 64 columns of dy each.
        input_tiles: tiles of 8 columns of x, which all warpgroups share; they divide the threads.
        chunk: rows staged at once.
        stages: chunks on their way or in shared memory.
        min_blocks: blocks a multiprocessor that registers are limited for.
    """

    output_groups: int
    input_tiles: int
    chunk: int
    stages: int
    min_blocks: int

    @property
    def threads(self) -> int:
        return 128 * self.output_groups

    @property
    def block_outputs(self) -> int:
        return 64 * self.output_groups

    @property
    def block_inputs(self) -> int:
        return 8 * self.input_tiles


@dataclass(frozen=True)
class WgmmaGradTiling:
    """The sizes that follow from a pattern, a mode and a configuration.

    ``joined`` linears that share x have their outputs in the same tiles.
    """

    pattern: Pattern
    mode: str
    config: WgmmaGradConfig
    joined: int = 1

    @property
    def groups(self) -> int:
        """Blocks a split of the rows, of each linear or of those that are joined."""
        config, (a, b, c, d) = self.config, self.pattern.factor_shape
        return a * ceil(self.joined * b * d / config.block_outputs) * ceil(c * d / config.block_inputs)

    @property
    def registers(self) -> int:
        """Registers a thread, estimated, sums of dy included."""
        return 4 * (self.config.input_tiles + 1) + _REGISTERS_BESIDE_SUMS

    def shared_bytes(self, bias: bool) -> int:
        """Dynamic shared memory of a block."""
        config = self.config
        panels = config.output_groups + ceil((config.input_tiles + bias) / 8)
        return config.stages * panels * config.chunk * 128

    def defines(self, bias: bool) -> dict[str, int]:
        """The macros that the kernel is compiled with; ``bias`` adds the sums of dy."""
        config = self.config
        return {
            **pattern_macros(self.pattern, self.mode),
            "WM": config.output_groups,
            "NT": config.input_tiles,
            "KR": config.chunk,
            "STAGES": config.stages,
            "MIN_BLOCKS": config.min_blocks,
            "JOINED": self.joined,
            "BIAS": int(bias),
        }

    def splits(self, rows: int, multiprocessors: int, linears: int = 1) -> tuple[int, int]:
        """How many splits of the rows to launch, and the chunks of rows of each."""
        groups, slots = self.groups * linears // self.joined, multiprocessors * self.config.min_blocks
        return splits_of(ceil(rows / self.config.chunk), groups, slots, self.pattern.nnz * linears)


@lru_cache(maxsize=512)
def wgmma_grad_configs(pattern: Pattern, mode: str, shared_limit: int) -> tuple[WgmmaGradConfig, ...]:
    """Configurations that fit, the most promising first, a dozen at most; none for what the kernel cannot run."""
    _, b, c, d = pattern.factor_shape
    if mode not in HALVES or b * d % 8 or c * d % 8 or d > _MOST_RESIDUES:
        return ()
    return most_promising(
        _enumerate(b * d, c * d),
        lambda config: config if _fits(WgmmaGradTiling(pattern, mode, config), shared_limit) else None,
        lambda config: _cost(WgmmaGradTiling(pattern, mode, config)),
    )


def _enumerate(outputs: int, inputs: int) -> Iterator[WgmmaGradConfig]:
    for output_groups, input_tiles in product((1, 2, 3, 4), (2, 4, 6, 8, 12, 16, 24, 32)):
        if 64 * output_groups >= outputs + 64 or (8 * input_tiles >= 2 * inputs and input_tiles > 2):
            continue
        if 128 * output_groups % input_tiles:  # the threads copy whole rows, each the same columns
            continue
        for (chunk, stages), min_blocks in product(((64, 4), (64, 3), (32, 6), (32, 4)), (1, 2, 3)):
            yield WgmmaGradConfig(output_groups, input_tiles, chunk, stages, min_blocks)


def _fits(tile: WgmmaGradTiling, shared_limit: int) -> bool:
    config = tile.config
    registers = min(255, 65536 // (config.threads * config.min_blocks) // 8 * 8)
    shared = tile.shared_bytes(bias=True)
    return tile.registers <= registers and shared <= shared_limit and (shared + 1024) * config.min_blocks <= shared_limit + 1024


def _cost(tile: WgmmaGradTiling) -> float:
    """Estimated microseconds for 25088 rows on a Hopper GPU with 132 multiprocessors."""
    config = tile.config
    splits, each = tile.splits(_ROWS, _MULTIPROCESSORS)
    sides, area = config.block_outputs + config.block_inputs, config.block_outputs * config.block_inputs
    waves = ceil(tile.groups * splits / (_MULTIPROCESSORS * config.min_blocks))
    rows = waves * each * config.chunk * config.min_blocks  # that a multiprocessor goes through
    reads = rows * 2 * sides / _BYTES_PER_US
    products = rows * 2 * area / _FLOPS_PER_US
    ahead = (config.stages - 1) * config.chunk * 2 * sides * config.min_blocks
    waits = each * waves * _CHUNK_US / min(config.min_blocks, 2) + _LATENCY_US * rows * 2 * sides / ahead
    results = waves * config.min_blocks * 24 * area / tile.pattern.d / _BYTES_PER_US
    return max(reads, products, waits) + 0.3 * (reads + products + waits) + results
