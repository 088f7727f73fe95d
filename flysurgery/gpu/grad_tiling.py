"""How the factor-gradient kernel tiles one pattern: a configuration, and the sizes that follow. Integers only."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, gcd

from flysurgery.gpu.pattern_macros import pattern_macros
from flysurgery.gpu.single_banks import best_pitch, feature_reads
from flysurgery.patterns import Pattern

_PARTIAL_BYTES = 32 << 20
_REGISTERS_BESIDE_TILES = {"fp16": 64, "bf16": 64, "tf32": 64, "fp32": 92}


@dataclass(frozen=True)
class GradConfig:
    """One way to run a factor gradient; every field is a compile-time constant of ``kernels/factor_grad.cu``.

    Attributes:
        output_warps, input_warps, residue_warps: warps a block along outputs p, inputs q and residues j.
        output_tiles: tiles of 16 outputs a warp.
        input_tiles: tiles of 8 inputs a warp.
        residues: residues a warp.
        neighbours: neighbouring features that a lane reads together.
        chunk: rows staged at once.
        stages: chunks in shared memory.
        min_blocks: blocks a multiprocessor that registers are limited for.
    """

    output_warps: int
    input_warps: int
    residue_warps: int
    output_tiles: int
    input_tiles: int
    residues: int
    neighbours: int
    chunk: int
    stages: int
    min_blocks: int

    @property
    def threads(self) -> int:
        return 32 * self.output_warps * self.input_warps * self.residue_warps

    @property
    def block_residues(self) -> int:
        return self.residue_warps * self.residues

    @property
    def block_outputs(self) -> int:
        return 16 * self.output_warps * self.output_tiles

    @property
    def block_inputs(self) -> int:
        return 8 * self.input_warps * self.input_tiles


@dataclass(frozen=True)
class GradTiling:
    """The sizes that follow from a pattern, a mode and a configuration."""

    pattern: Pattern
    mode: str
    config: GradConfig

    @property
    def element_bytes(self) -> int:
        return 2 if self.mode in ("fp16", "bf16") else 4

    @property
    def groups(self) -> int:
        """Blocks a split of the rows."""
        config, pattern = self.config, self.pattern
        tiles = ceil(pattern.b / config.block_outputs) * ceil(pattern.c / config.block_inputs)
        return pattern.a * ceil(pattern.d / config.block_residues) * tiles

    def _pitch(self, features: int) -> int:
        config, width = self.config, self.element_bytes
        key = feature_reads(config.block_residues, config.residues, config.neighbours, width)
        return best_pitch(features * config.block_residues * width, key)[0]

    @property
    def x_pitch(self) -> int:
        """Bytes from row to row of staged x."""
        return self._pitch(self.config.block_inputs)

    @property
    def dy_pitch(self) -> int:
        """Bytes from row to row of staged dy."""
        return self._pitch(self.config.block_outputs)

    def _vector(self, block: int, tile: int) -> int:
        d, residues, width = self.pattern.d, self.config.block_residues, self.element_bytes
        spans = (block * d, tile * d) if residues == d else (d, residues)
        return gcd(16, *(span * width for span in spans))

    @property
    def x_vector(self) -> int:
        """Widest copy of x, in bytes, that the pattern's alignment allows."""
        return self._vector(self.pattern.c, self.config.block_inputs)

    @property
    def dy_vector(self) -> int:
        """Widest copy of dy, in bytes, that the pattern's alignment allows."""
        return self._vector(self.pattern.b, self.config.block_outputs)

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block."""
        return self.config.stages * self.config.chunk * (self.x_pitch + self.dy_pitch)

    @property
    def registers(self) -> int:
        """Registers a thread, estimated."""
        config = self.config
        planes = 2 if self.mode == "fp32" else 1
        sums = 4 * config.output_tiles * config.input_tiles * config.residues
        left = 4 * config.output_tiles * config.residues * planes
        right = 2 * config.neighbours * config.residues * (planes + 1)
        return sums + left + right + _REGISTERS_BESIDE_TILES[self.mode]

    def _min_blocks(self, bias: bool) -> int:
        """Blocks a multiprocessor that the registers allow, those for the sums of dy included."""
        config = self.config
        registers = self.registers + (4 * config.output_tiles * config.residues if bias else 0)
        return max(1, min(config.min_blocks, 65536 // (ceil(registers / 8) * 8 * config.threads)))

    def defines(self, x_vector: int, dy_vector: int, bias: bool) -> dict[str, int]:
        """The macros that the kernel is compiled with; ``bias`` adds the sums of dy."""
        config = self.config
        return {
            **pattern_macros(self.pattern, self.mode),
            "WM": config.output_warps,
            "WN": config.input_warps,
            "WJ": config.residue_warps,
            "MT": config.output_tiles,
            "NT": config.input_tiles,
            "R": config.residues,
            "P": config.neighbours,
            "KR": config.chunk,
            "STAGES": config.stages,
            "MIN_BLOCKS": self._min_blocks(bias),
            "BIAS": int(bias),
            "X_VECTOR": x_vector,
            "DY_VECTOR": dy_vector,
            "X_PITCH": self.x_pitch,
            "DY_PITCH": self.dy_pitch,
        }

    def splits(self, rows: int, multiprocessors: int, linears: int = 1) -> tuple[int, int]:
        """How many splits of the rows to launch, and the chunks of rows of each."""
        groups, slots = self.groups * linears, multiprocessors * self.config.min_blocks
        return splits_of(ceil(rows / self.config.chunk), groups, slots, self.pattern.nnz * linears)


def splits_of(chunks: int, groups: int, slots: int, nnz: int) -> tuple[int, int]:
    """How many splits to launch for a number of chunks of rows, and the chunks of each.

    Args:
        groups: blocks a split.
        slots: blocks that run at the same time.
        nnz: elements of the gradients, of which each split has its own.
    """
    most = max(1, min(chunks, _PARTIAL_BYTES // (4 * nnz)))

    def waves(splits: int) -> float:
        return ceil(groups * splits / slots) * (ceil(chunks / splits) + 4) + 0.02 * splits

    best = min(range(1, min(most, 2 * slots) + 1), key=waves)
    each = ceil(chunks / best)
    return ceil(chunks / each), each
