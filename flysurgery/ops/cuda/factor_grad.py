"""The gradient of one factor, without permuted copies of the activations."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from math import ceil, gcd

import torch
from torch import Tensor

from flysurgery.errors import BackendError
from flysurgery.ops.cuda.kernel import Kernel, current_stream, load_kernel
from flysurgery.ops.cuda.single_banks import best_pitch, feature_reads
from flysurgery.patterns import Pattern

MODES = ("fp16", "bf16", "tf32", "fp32")
_HOPPER_SHARED_BYTES = 227 * 1024
_PARTIAL_BYTES = 32 << 20
_SUMS_A_BLOCK = 32
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

    def defines(self, x_vector: int, dy_vector: int) -> dict[str, int]:
        """The macros that the kernel is compiled with."""
        config, pattern = self.config, self.pattern
        return {
            "PATTERN_A": pattern.a,
            "PATTERN_B": pattern.b,
            "PATTERN_C": pattern.c,
            "PATTERN_D": pattern.d,
            "MODE": MODES.index(self.mode),
            "WM": config.output_warps,
            "WN": config.input_warps,
            "WJ": config.residue_warps,
            "MT": config.output_tiles,
            "NT": config.input_tiles,
            "R": config.residues,
            "P": config.neighbours,
            "KR": config.chunk,
            "STAGES": config.stages,
            "MIN_BLOCKS": config.min_blocks,
            "X_VECTOR": x_vector,
            "DY_VECTOR": dy_vector,
            "X_PITCH": self.x_pitch,
            "DY_PITCH": self.dy_pitch,
        }

    def splits(self, rows: int, multiprocessors: int) -> tuple[int, int]:
        """How many splits of the rows to launch, and the chunks of rows of each."""
        chunks = ceil(rows / self.config.chunk)
        slots = multiprocessors * self.config.min_blocks
        most = max(1, min(chunks, _PARTIAL_BYTES // (4 * self.pattern.nnz)))

        def waves(splits: int) -> float:
            return ceil(self.groups * splits / slots) * (ceil(chunks / splits) + 4) + 0.02 * splits

        best = min(range(1, min(most, 2 * slots) + 1), key=waves)
        each = ceil(chunks / best)
        return ceil(chunks / each), each


@lru_cache(maxsize=512)
def grad_configs(pattern: Pattern, mode: str, shared_limit: int = _HOPPER_SHARED_BYTES) -> tuple[GradConfig, ...]:
    """Configurations that fit, the most promising first; a dozen at most."""
    found = []
    for config in _enumerate(pattern, mode):
        filled = _fill(GradTiling(pattern, mode, config), shared_limit)
        if filled is not None:
            found.append((_cost(GradTiling(pattern, mode, filled)), filled))
    found.sort(key=lambda pair: pair[0])
    return tuple(config for _, config in found[:12])


def _enumerate(pattern: Pattern, mode: str) -> Iterator[GradConfig]:
    width = 2 if mode in ("fp16", "bf16") else 4
    for residues, residue_warps, neighbours in _residues(pattern.d, width):
        for output_tiles in (1, 2, 3, 4):
            for input_tiles in (1, 2, 3, 4, 6, 8):
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
    l2 = features * config.chunk * width * sector / 22
    reads = config.block_outputs * config.input_warps + config.block_inputs * config.output_warps
    shared = (reads * config.block_residues + features) * config.chunk * width / 128
    warps = config.threads / 32
    copies = 6 * features * config.chunk * width / (16 * config.threads) + 40
    rate = min(0.8, 0.14 * warps * config.min_blocks / 4)  # instructions a clock of a scheduler: few warps leave latency open
    issue = (_step_instructions(tile) * config.chunk / (16 if width == 2 else 8) + copies) * warps / 4 / rate
    parts = (arithmetic, l2, shared, issue)
    waves = ceil(tile.groups * splits / (132 * config.min_blocks)) * config.min_blocks
    partial = 0 if splits == 1 else 2 * splits * pattern.nnz * 4 / 132 / 26
    return waves * each * (max(parts) + 0.15 * sum(parts) + 300 / config.min_blocks) + partial


def _step_instructions(tile: GradTiling) -> float:
    """Instructions of a warp for the rows of one product: reads, what takes residues apart or splits floats, products."""
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


def grad_reason(pattern: Pattern, mode: str, shared_limit: int = _HOPPER_SHARED_BYTES) -> str | None:
    """Why the factor-gradient kernel cannot run a pattern, or None where it can. Modes: ``fp16``, ``bf16``, ``tf32``, ``fp32``."""
    if mode not in MODES:
        return f"the factor-gradient kernel has no mode '{mode}', only {', '.join(MODES)}"
    if not grad_configs(pattern, mode, shared_limit):
        return f"no tile of the gradient of pattern {pattern} in mode {mode} fits in {shared_limit} bytes of shared memory"
    return None


class FactorGrad:
    """The gradient of one factor of one pattern and mode.

    Args:
        pattern: compiled into the kernel.
        mode: ``fp16`` and ``bf16`` for inputs of these types; ``tf32`` and ``fp32`` for float32 inputs.
        config: one of ``grad_configs``; None takes the first.
        shared_limit: bytes of shared memory that a block may use on the device.

    Raises:
        BackendError: the kernel cannot run this; ``grad_reason`` tells beforehand.

    Cost of a call of R rows: ``R * flops_per_row`` operations (three times in mode ``fp32``), x and dy read from device
    memory once, and a workspace of at most 32 MiB or one factor. Two runs give equal bits.
    """

    def __init__(self, pattern: Pattern, mode: str, config: GradConfig | None = None, *, shared_limit: int = _HOPPER_SHARED_BYTES) -> None:
        reason = grad_reason(pattern, mode, shared_limit)
        if config is None and reason is not None:
            raise BackendError(reason)
        self.pattern = pattern
        self.mode = mode
        self.tile = GradTiling(pattern, mode, config or grad_configs(pattern, mode, shared_limit)[0])
        self.shared_bytes = self.tile.shared_bytes
        self._kernels: dict[tuple[int, int, int], tuple[Kernel, Kernel]] = {}
        self._splits: dict[tuple[int, int], tuple[int, int]] = {}

    def run(
        self,
        x: Tensor,  # shape: (rows, a*c*d)
        dy: Tensor,  # shape: (rows, a*b*d)
    ) -> Tensor:  # shape: (a, b, c, d), float32
        """Launch on the current stream. Rows may be strided, features must be adjacent; any alignment of whole elements.

        Raises:
            BackendError: the features of x or dy are not adjacent.
        """
        rows = x.shape[0]
        if rows == 0:
            return torch.zeros(self.pattern.factor_shape, dtype=torch.float32, device=x.device)
        for name, tensor in (("x", x), ("dy", dy)):
            if tensor.stride(1) != 1 and tensor.shape[1] > 1:
                raise BackendError(f"the factor-gradient kernel needs adjacent features, {name} has strides {tensor.stride()}")
        device = x.device.index
        product, total = self._load(device, _vector(x, self.tile.x_vector), _vector(dy, self.tile.dy_vector))
        splits, chunks = self._split(rows, device)
        out = torch.empty(self.pattern.factor_shape, dtype=torch.float32, device=x.device)
        partial = out if splits == 1 else torch.empty((splits, self.pattern.nnz), dtype=torch.float32, device=x.device)
        stream = current_stream(device)
        product.launch(
            (self.tile.groups * splits, 1, 1),
            (self.tile.config.threads, 1, 1),
            self.shared_bytes,
            stream,
            *(x, dy, partial, rows, x.stride(0), dy.stride(0), chunks),
        )
        if splits > 1:
            total.launch((ceil(self.pattern.nnz / _SUMS_A_BLOCK), 1, 1), (256, 1, 1), 0, stream, partial, out, splits)
        return out

    def _load(self, device: int, x_vector: int, dy_vector: int) -> tuple[Kernel, Kernel]:
        kernels = self._kernels.get((device, x_vector, dy_vector))
        if kernels is None:
            defines = self.tile.defines(x_vector, dy_vector)
            kernels = (
                load_kernel("factor_grad.cu", defines, name="factor_grad", device_index=device),
                load_kernel("factor_grad.cu", defines, name="factor_grad_sum", device_index=device),
            )
            self._kernels[device, x_vector, dy_vector] = kernels
        return kernels

    def _split(self, rows: int, device: int) -> tuple[int, int]:
        found = self._splits.get((rows, device))
        if found is None:
            found = self.tile.splits(rows, torch.cuda.get_device_properties(device).multi_processor_count)
            self._splits[rows, device] = found
        return found


def _vector(tensor: Tensor, widest: int) -> int:
    aligned = (tensor.data_ptr() | tensor.stride(0) * tensor.element_size()) % widest == 0
    return widest if aligned else tensor.element_size()


def grad_config_from_json(fields: dict[str, object]) -> GradConfig:
    """The inverse of ``grad_config_to_json``, for tables of tuned configurations."""
    return GradConfig(**fields)  # pyright: ignore[reportArgumentType]


def grad_config_to_json(config: GradConfig) -> dict[str, object]:
    """A configuration as plain values."""
    return asdict(config)
