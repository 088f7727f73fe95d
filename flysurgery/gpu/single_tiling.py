"""How the single-factor kernel tiles one pattern: a configuration, the sizes that follow, and the choice by an estimate. Integers only."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import ceil, gcd
from typing import ClassVar

from flysurgery.gpu.modes import OfMode, macros
from flysurgery.patterns import Pattern

HEADER_BYTES = 128
_BANKS, _LANES = 32, 32
_REGISTERS_BESIDE_TILES = 60
_REGISTERS_OF_SCALING = 48
_TILES_A_BLOCK = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64, 96, 128)
_SHARED_WEIGHT_BYTES = 24 << 20
_PLANNED_ROWS = 25088
_MAX_BLOCKS = 4
_CANDIDATES = 12
_DRAM_ACCESS = 64

Spans = tuple[tuple[tuple[int, int], ...], ...]
"""What each of the four lanes that share a row reads or writes of it, as ``(first byte, bytes)``."""


@lru_cache(maxsize=8192)
def _pitch_of_x(chunk: int, residue_warps: int, residues: int, interleaved: bool, width: int) -> tuple[int, float]:
    pitch, size = residue_warps * residues * width, -(-residues * width // 4) * 4
    if residue_warps == 1 and not interleaved:
        spans = tuple(((lane * 4 * pitch, 4 * residues * width),) for lane in range(4))
    else:
        places = [[lane + 4 * m if interleaved else 4 * lane + m for m in range(4)] for lane in range(4)]
        spans = tuple(tuple((place * pitch, size) for place in of_lane) for of_lane in places)
    return _best_pitch(chunk * pitch, spans)


@lru_cache(maxsize=8192)
def _pitch_of_y(outputs: int, residue_warps: int, residues: int, width: int) -> int:
    pitch, size = residue_warps * residues * width, residues * width
    if residue_warps == 1:
        spans = tuple(((2 * lane * pitch, 2 * pitch),) for lane in range(4))
    else:
        spans = tuple(((2 * lane * pitch, size), ((2 * lane + 1) * pitch, size)) for lane in range(4))
    return _best_pitch(outputs * pitch, spans)[0]


def _best_pitch(row_bytes: int, spans: Spans) -> tuple[int, float]:
    """The shortest pitch of at least ``row_bytes`` with the fewest conflicts, and its wavefronts over the least possible."""
    base = -(-row_bytes // 16) * 16
    pad, conflicts = _best_pad(base % (4 * _BANKS) + 4 * _BANKS, spans)  # with a pitch of 0 all rows would coincide
    return base + pad, conflicts


@lru_cache(maxsize=8192)
def _best_pad(base: int, spans: Spans) -> tuple[int, float]:
    accesses = [*zip(*([vector for span in lane for vector in _vectors(*span)] for lane in spans), strict=True)]  # warp-wide ones
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


@dataclass(frozen=True)
class SingleConfig:
    """One way to run a single factor; every field is a compile-time constant of ``kernels/single_factor.cu``."""

    row_warps: int  # warps of a block along rows, outputs p and residues j
    output_warps: int
    residue_warps: int
    row_tiles: int  # tiles of 16 rows a warp
    output_tiles: int  # tiles of 8 outputs a warp
    residues: int  # residues a warp
    chunk: int  # inputs q in a chunk
    stages: int = 2  # chunks of x in shared memory
    resident: bool = True  # whether all weights of a block stay in shared memory
    interleaved: bool = False  # whether a thread's four q of 16 lie four apart instead of side by side
    min_blocks: int = 1  # blocks a multiprocessor that registers are limited for

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

    @cached_property
    def counts(self) -> tuple[int, int, int]:
        """Residue ranges, output tiles and chunks that cover the pattern."""
        config, (_, b, c, d) = self.config, self.pattern.factor_shape
        return ceil(d / config.block_residues), ceil(b / config.block_outputs), ceil(c / config.chunk)

    @property
    def groups(self) -> int:
        """Blocks side by side over one tile of rows."""
        ranges, output_tiles, _ = self.counts
        return self.pattern.a * ranges * output_tiles

    @property
    def weight_chunk_bytes(self) -> int:
        config = self.config
        return config.block_residues * self.images * config.chunk * config.block_outputs * 2

    @cached_property
    def x_pitch_and_conflicts(self) -> tuple[int, float]:
        """Bytes from row to row of a staged chunk of x, and the wavefronts of reading it over the least possible."""
        config = self.config
        return _pitch_of_x(config.chunk, config.residue_warps, config.residues, config.interleaved, self.element_bytes)

    @cached_property
    def y_pitch(self) -> int:
        """Bytes from row to row of a slab of y."""
        return _pitch_of_y(self.config.block_outputs, self.config.residue_warps, self.config.residues, self.element_bytes)

    @property
    def x_vector(self) -> int:
        """Widest copy, in bytes, that the pattern's alignment allows; x itself may force a narrower one."""
        return self._vector(self.pattern.c, self.config.chunk)

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
        config, weights = self.config, self.weight_chunk_bytes
        bias = ceil(config.block_outputs * config.block_residues * 4 / 16) * 16
        fixed = bias + config.row_warps * 8 * self.y_pitch + (self.counts[2] * weights if resident else 0)
        return fixed, config.block_rows * self.x_pitch_and_conflicts[0] + (0 if resident else weights)

    @property
    def registers(self) -> int:
        """Registers a thread, estimated: accumulators, fragments, scales, and what stands beside them."""
        config = self.config
        rows = config.row_tiles * config.residues
        scales = 2 * rows + _REGISTERS_OF_SCALING if self.element_bytes == 4 else 0
        return 4 * rows * (config.output_tiles + self.images) + scales + config.residues * self.element_bytes + _REGISTERS_BESIDE_TILES

    @property
    def ranges_fast(self) -> int:
        """How many neighbouring residue ranges run together. They share lines of x, but their weights need more of the L2 cache."""
        ranges, output_tiles, chunks = self.counts
        each = output_tiles * chunks * self.weight_chunk_bytes
        return max(n for n in range(1, ranges + 1) if ranges % n == 0 and (n == 1 or n * each <= _SHARED_WEIGHT_BYTES))

    def defines(self, x_vector: int) -> dict[str, int]:
        """The macros that the kernel is compiled with; x is copied ``x_vector`` bytes at a time."""
        config, y_vector = self.config, self._vector(self.pattern.b, self.config.block_outputs)
        warps = {"wm": config.row_warps, "wn": config.output_warps, "wj": config.residue_warps}
        tiles = {"mt": config.row_tiles, "nt": config.output_tiles, "r": config.residues, "kc": config.chunk, "stages": config.stages}
        copies = {"x_vector": x_vector, "y_vector": y_vector, "x_pitch": self.x_pitch_and_conflicts[0], "y_pitch": self.y_pitch}
        order = {"resident": config.resident, "interleaved_q": config.interleaved, "ranges_fast": self.ranges_fast}
        letters = {f"pattern_{name}": size for name, size in zip("abcd", self.pattern.factor_shape, strict=True)}
        return macros(mode=self.mode, min_blocks=config.min_blocks, **letters, **warps, **tiles, **copies, **order)

    def row_chunks(self, rows: int, multiprocessors: int) -> tuple[int, int]:
        """How many row chunks to launch and how many tiles of rows each takes, for the least time of the slowest block."""
        groups, chunks = self.groups, self.counts[2]
        tiles = ceil(rows / self.config.block_rows)
        slots = multiprocessors * self.config.min_blocks
        stage = self.config.block_rows * self.x_pitch_and_conflicts[0] * chunks
        start = 0.5 + (chunks * self.weight_chunk_bytes / stage if self.config.resident else 0)

        def waves(each: int) -> float:
            return ceil(groups * ceil(tiles / each) / slots) * (each + start)

        each = min((n for n in _TILES_A_BLOCK if n <= tiles), key=waves)
        return ceil(tiles / each), each


@lru_cache(maxsize=4096)
def candidates(pattern: Pattern, mode: str, shared_limit: int) -> tuple[SingleConfig, ...]:
    """Configurations that fit, the most promising first; a dozen at most."""
    filled = [_fill(SingleTiling(pattern, mode, config), shared_limit) for config in _enumerate(pattern, mode)]
    fitting = [tile for tile in filled if tile is not None]
    return tuple([tile.config for tile in sorted(fitting, key=_cost)[:_CANDIDATES]])


def single_reason(pattern: Pattern, mode: str, shared_limit: int) -> str | None:
    """Why the single-factor kernel cannot run a pattern in a mode with this much shared memory a block, or None where it can."""
    if not candidates(pattern, mode, shared_limit):
        return f"no tile of pattern {pattern} in mode {mode} fits in {shared_limit} bytes of shared memory"
    return None


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
                            yield SingleConfig(row_warps, output_warps, residue_warps, row_tiles, output_tiles, residues, chunk)


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


def _fill(tile: SingleTiling, shared_limit: int) -> SingleTiling | None:
    """Choose the reading order, keep the weights in shared memory if they fit, and use the rest for blocks and stages."""
    config = tile.config
    if (config.residues * tile.element_bytes) % 4 == 0:
        other = replace(tile, config=replace(config, interleaved=True))
        if config.residue_warps > 1 or other.x_pitch_and_conflicts[1] < tile.x_pitch_and_conflicts[1]:
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
                    return replace(tile, config=replace(config, stages=stages, resident=resident, min_blocks=blocks))
    return None


def _cost(tile: SingleTiling) -> float:
    """Estimated clock cycles of one multiprocessor for the planned rows, on a Hopper GPU."""
    pattern, config, width = tile.pattern, tile.config, tile.element_bytes
    ranges, output_tiles, chunks = tile.counts
    inputs = chunks * config.chunk
    x_elements = config.block_rows * inputs * config.block_residues
    y_elements = config.block_rows * config.block_outputs * config.block_residues
    weights = chunks * tile.weight_chunk_bytes
    row_chunks, each = tile.row_chunks(_PLANNED_ROWS, 132)
    streamed = weights / each if config.resident else weights
    products = y_elements * inputs
    arithmetic = products * (3 if tile.images == 2 else 1) / 2048 * 1.6
    per_element = {2: 0.5, 4: 3.5 if tile.images == 1 else 5.0}[width]
    issue = (x_elements * config.output_warps * per_element + products / 512 * (4 if tile.images == 2 else 1) * 32) / 128
    read = x_elements * width * (1 + config.output_warps * tile.x_pitch_and_conflicts[1])
    shared = (read + streamed + weights * config.row_warps + 2 * y_elements * width) / 128
    sector = 1.0 if config.block_residues == pattern.d else max(1.0, 32 / (config.block_residues * width))
    l2 = (x_elements * width * sector + streamed + y_elements * width) / 26
    fast = tile.ranges_fast
    line = 1.0 if ranges == fast else max(1.0, _DRAM_ACCESS / (config.block_residues * fast * width))
    memory = (x_elements / output_tiles + y_elements) * width * line / 18.7
    parts = (arithmetic, issue, shared, l2, memory)
    idle = (120 * chunks + 400 + 0.3 * y_elements * width / 26) / config.min_blocks
    waves = ceil(tile.groups * row_chunks / (132 * config.min_blocks))
    return waves * each * config.min_blocks * (max(parts) + 0.15 * sum(parts) + idle)
