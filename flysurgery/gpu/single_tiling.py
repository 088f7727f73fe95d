"""How the single-factor kernel tiles one pattern: a configuration, and the sizes and pitches that follow. Integers only."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil, gcd
from typing import ClassVar

from flysurgery.gpu.modes import OfMode, macros
from flysurgery.patterns import Pattern

_BANKS, _LANES = 32, 32
Spans = Callable[..., list[tuple[int, int]]]
"""What lane t of the four that share a row reads or writes of it, as ``(first byte, bytes)``."""


def _read_spans(t: int, residue_warps: int, residues: int, interleaved: bool, element_bytes: int) -> list[tuple[int, int]]:
    """Of a warp of the kernel that reads 16 inputs q."""
    pitch = residue_warps * residues * element_bytes
    if residue_warps == 1 and not interleaved:
        return [(t * 4 * pitch, 4 * residues * element_bytes)]
    size = -(-residues * element_bytes // 4) * 4
    return [((t + 4 * m if interleaved else 4 * t + m) * pitch, size) for m in range(4)]


def _write_spans(t: int, residue_warps: int, residues: int, element_bytes: int) -> list[tuple[int, int]]:
    """Of a warp of the kernel that writes a tile of 8 outputs."""
    pitch = residue_warps * residues * element_bytes
    return [(2 * t * pitch, 2 * pitch)] if residue_warps == 1 else [((2 * t + p) * pitch, residues * element_bytes) for p in (0, 1)]


def best_pitch(row_bytes: int, spans: Spans, *sizes: int) -> tuple[int, float]:
    """The shortest pitch of at least ``row_bytes`` with the fewest conflicts, and its wavefronts over the least possible."""
    base = -(-row_bytes // 16) * 16
    pad, conflicts = _best_pad(base % (4 * _BANKS) + 4 * _BANKS, spans, *sizes)  # with a pitch of 0 all rows would coincide
    return base + pad, conflicts


@lru_cache(maxsize=8192)
def _best_pad(base: int, spans: Spans, *sizes: int) -> tuple[int, float]:
    vectors = [[vector for span in spans(t, *sizes) for vector in _vectors(*span)] for t in range(4)]
    accesses = [*zip(*vectors, strict=True)]  # warp-wide ones, of the four lanes of a row each
    conflicts, pad = min((_wavefronts(base + pad, accesses), pad) for pad in range(0, 4 * _BANKS, 16))
    return pad, conflicts


def _vectors(start: int, size: int) -> list[tuple[int, int]]:
    """(offset, width) of the accesses that cover ``size`` bytes, as ``read_words`` and ``write_words`` split them."""
    width = 16 if size % 16 == 0 else 8 if size % 8 == 0 else 4
    return [(start + offset, width) for offset in range(0, size, width)]


def _wavefronts(pitch: int, accesses: Sequence[Sequence[tuple[int, int]]]) -> float:
    count, least = 0, 0.0
    for of_row in accesses:
        width = of_row[0][1]
        together = _LANES * 4 // width
        for start in range(0, _LANES, together):
            starts = [(lane // 4 * pitch + of_row[lane % 4][0]) // 4 for lane in range(start, start + together)]
            words = {first + word for first in starts for word in range(width // 4)}
            count += max(Counter(word % _BANKS for word in words).values())
        least += _LANES * width / (4 * _BANKS)
    return count / least


HEADER_BYTES = 128
_REGISTERS_BESIDE_TILES = 60
_REGISTERS_OF_SCALING = 48
_TILES_A_BLOCK = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64, 96, 128)
_SHARED_WEIGHT_BYTES = 24 << 20


@dataclass(frozen=True)
class SingleConfig:
    """One way to run a single factor; every field is a compile-time constant of ``kernels/single_factor.cu``.

    Attributes:
        row_warps, output_warps, residue_warps: warps a block along rows, outputs p and residues j.
        row_tiles: tiles of 16 rows a warp.
        output_tiles: tiles of 8 outputs a warp.
        residues: residues a warp.
        chunk: inputs q in a chunk.
        stages: chunks of x in shared memory.
        resident: whether all weights of a block stay in shared memory.
        interleaved: whether a thread's four q of 16 lie four apart instead of side by side.
        min_blocks: blocks a multiprocessor that registers are limited for.
    """

    row_warps: int
    output_warps: int
    residue_warps: int
    row_tiles: int
    output_tiles: int
    residues: int
    chunk: int
    stages: int
    resident: bool
    interleaved: bool
    min_blocks: int

    @property
    def threads(self) -> int:
        return 32 * self.row_warps * self.output_warps * self.residue_warps

    @property
    def block_rows(self) -> int:
        return 16 * self.row_warps * self.row_tiles

    @property
    def block_outputs(self) -> int:
        return 8 * self.output_warps * self.output_tiles

    @property
    def block_residues(self) -> int:
        return self.residue_warps * self.residues


@dataclass(frozen=True)
class SingleTiling(OfMode):
    """The sizes that follow from a pattern, a mode and a configuration."""

    kernel: ClassVar[str] = "single_factor"
    pattern: Pattern
    mode: str
    config: SingleConfig

    @property
    def counts(self) -> tuple[int, int, int]:
        """Residue ranges, output tiles and chunks that cover the pattern."""
        config = self.config
        return (
            ceil(self.pattern.d / config.block_residues),
            ceil(self.pattern.b / config.block_outputs),
            ceil(self.pattern.c / config.chunk),
        )

    @property
    def groups(self) -> int:
        """Blocks side by side over one tile of rows."""
        ranges, output_tiles, _ = self.counts
        return self.pattern.a * ranges * output_tiles

    @property
    def weight_chunk_bytes(self) -> int:
        config = self.config
        return config.block_residues * self.images * config.chunk * config.block_outputs * 2

    @property
    def x_pitch(self) -> int:
        """Bytes from row to row of a staged chunk of x."""
        return self._x_pitch_and_conflicts()[0]

    @property
    def read_conflicts(self) -> float:
        """Shared-memory wavefronts of reading x, over the least possible."""
        return self._x_pitch_and_conflicts()[1]

    def _x_pitch_and_conflicts(self) -> tuple[int, float]:
        config, width = self.config, self.element_bytes
        sizes = config.residue_warps, config.residues, config.interleaved, width
        return best_pitch(config.chunk * config.block_residues * width, _read_spans, *sizes)

    @property
    def y_pitch(self) -> int:
        """Bytes from row to row of a slab of y."""
        config, width = self.config, self.element_bytes
        sizes = config.residue_warps, config.residues, width
        return best_pitch(config.block_outputs * config.block_residues * width, _write_spans, *sizes)[0]

    @property
    def x_vector(self) -> int:
        """Widest copy, in bytes, that the pattern's alignment allows; x itself may force a narrower one."""
        return self._vector(self.pattern.c, self.config.chunk)

    @property
    def y_vector(self) -> int:
        """Widest store, in bytes, that the pattern's alignment allows."""
        return self._vector(self.pattern.b, self.config.block_outputs)

    def _vector(self, block: int, tile: int) -> int:
        d, residues = self.pattern.d, self.config.block_residues
        spans = (block * d, tile * d) if residues == d else (d, residues)
        return gcd(16, *(span * self.element_bytes for span in spans))

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block."""
        fixed, stage = self.shared_parts(self.config.resident)
        return fixed + self.config.stages * stage

    def shared_parts(self, resident: bool) -> tuple[int, int]:
        """Bytes of shared memory beside the stages, resident weights among them, and of one stage."""
        config = self.config
        weights = self.weight_chunk_bytes
        bias = ceil(config.block_outputs * config.block_residues * 4 / 16) * 16
        fixed = bias + config.row_warps * 8 * self.y_pitch + (self.counts[2] * weights if resident else 0)
        return fixed, config.block_rows * self.x_pitch + (0 if resident else weights)

    @property
    def registers(self) -> int:
        """Registers a thread, estimated: accumulators, fragments, scales, and what stands beside them."""
        config = self.config
        sums = 4 * config.row_tiles * config.residues * config.output_tiles
        fragments = 4 * config.row_tiles * config.residues * self.images
        scales = 2 * config.row_tiles * config.residues + _REGISTERS_OF_SCALING if self.element_bytes == 4 else 0
        return sums + fragments + scales + config.residues * self.element_bytes + _REGISTERS_BESIDE_TILES

    @property
    def ranges_fast(self) -> int:
        """How many neighbouring residue ranges run together. They share lines of x, but their weights need more of the L2 cache."""
        ranges, output_tiles, chunks = self.counts
        each = output_tiles * chunks * self.weight_chunk_bytes
        return max(n for n in range(1, ranges + 1) if ranges % n == 0 and (n == 1 or n * each <= _SHARED_WEIGHT_BYTES))

    def defines(self, x_vector: int) -> dict[str, int]:
        """The macros that the kernel is compiled with; x is copied ``x_vector`` bytes at a time."""
        config = self.config
        warps = {"wm": config.row_warps, "wn": config.output_warps, "wj": config.residue_warps}
        tiles = {"mt": config.row_tiles, "nt": config.output_tiles, "r": config.residues, "kc": config.chunk, "stages": config.stages}
        copies = {"x_vector": x_vector, "y_vector": self.y_vector, "x_pitch": self.x_pitch, "y_pitch": self.y_pitch}
        order = {"resident": config.resident, "interleaved_q": config.interleaved, "ranges_fast": self.ranges_fast}
        letters = {f"pattern_{name}": size for name, size in zip("abcd", self.pattern.factor_shape, strict=True)}
        return macros(mode=self.mode, min_blocks=config.min_blocks, **letters, **warps, **tiles, **copies, **order)

    def row_chunks(self, rows: int, multiprocessors: int) -> tuple[int, int]:
        """How many row chunks to launch and how many tiles of rows each takes, for the least time of the slowest block."""
        groups, chunks = self.groups, self.counts[2]
        tiles = ceil(rows / self.config.block_rows)
        slots = multiprocessors * self.config.min_blocks
        stage = self.config.block_rows * self.x_pitch * chunks
        start = 0.5 + (chunks * self.weight_chunk_bytes / stage if self.config.resident else 0)

        def waves(each: int) -> float:
            return ceil(groups * ceil(tiles / each) / slots) * (each + start)

        each = min((n for n in _TILES_A_BLOCK if n <= tiles), key=waves)
        return ceil(tiles / each), each


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
