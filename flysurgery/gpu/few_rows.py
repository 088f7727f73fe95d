"""Linears on few rows, or on some hundred, in one launch with an epilogue, and for the fewest a norm before; factors are multiplied out."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import product
from math import sqrt
from typing import ClassVar

import torch
from torch import Tensor

from flysurgery.errors import BackendError
from flysurgery.factors import factors_to_dense
from flysurgery.gpu.device import multiprocessors_of, shared_limit_of
from flysurgery.gpu.fused_linear import readable, strides_of
from flysurgery.gpu.kernel import current_stream, float_bits, kernel_of
from flysurgery.gpu.modes import HALF_MODES, HALVES, WEIGHT_SHIFT, in_halves, macros, scaled_rows
from flysurgery.gpu.operands import Dense, Linear, Norm, present
from flysurgery.gpu.recording import fresh
from flysurgery.gpu.weight_cache import derived_for_launch

_CHUNK = 32  # inputs of which a lane takes adjacent 16 bytes
_MOST_WARPS_OF_FEW = 12
_CHUNKS_OF_WARP = (2, 4)
"""The least and the most chunks of a warp: fewer would give too many sums to add, more would not fit in registers."""
_ROW_TILES, _COLUMNS = (1, 2, 3), (32, 48, 64, 96, 128)
_REGISTERS_BESIDE_FEW, _REGISTERS_OF_NORM = 12, 16
_REGISTERS, _REGISTERS_OF_THREAD, _MOST_RESIDENT = 65536, 224, 2

_SLAB = 64  # inputs
_STEP, _MOST_ROWS = 64, 3200  # rows; more were not timed
_ROWS, _SPLITS, _SHARES = (64, 128), (1, 2, 3), (1, 2, 4)
_RESIDENT = (1, 2, 3)
_BEST_SPLIT = 2  # of those whose estimates are equal
_FEWEST_STAGES, _MOST_STAGES = 3, 8
_FEWEST_WARPS_OF_FLOATS, _MOST_WARPS = 8, 16
_MOST_REGISTERS, _REGISTERS_BESIDE = 168, 64
_RESERVED = 1024  # bytes of shared memory that a block takes beside its own


def _pitch(columns: int) -> int:
    """Sums from row to row in shared memory."""
    return columns + (40 - columns % 32) % 32


@dataclass(frozen=True)
class FewRowsTiling:
    """Sizes of ``kernels/few_rows.cu``.

    Attributes:
        norm: whether rows of x are normalized first.
        row_tiles: of 16 rows, of a block.
        columns: outputs of a block.
        split: warps of a block, each with its share of the inputs.
    """

    kernel: ClassVar[str] = "few_rows"
    in_features: int
    out_features: int
    norm: bool
    row_tiles: int
    columns: int
    split: int

    @property
    def warps(self) -> int:
        return self.split

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block: the sums of each warp, and vectors of the columns and of the norm."""
        return 4 * (self.split * 16 * self.row_tiles * _pitch(self.columns) + 2 * self.columns + 2 * self.in_features * self.norm)

    @property
    def registers(self) -> int:
        """Registers a thread, estimated: the operands and sums of a warp, and what stands beside them."""
        chunks, tiles = self.in_features // _CHUNK // self.split, self.columns // 8
        return tiles * chunks * 4 + self.row_tiles * (chunks * 8 + tiles * 4) + _REGISTERS_BESIDE_FEW + _REGISTERS_OF_NORM * self.norm

    @property
    def resident(self) -> int:
        """Blocks for which the registers of a multiprocessor suffice, up to ``_MOST_RESIDENT``."""
        rounded = -(-self.registers // 8) * 8
        return min(_REGISTERS // (32 * self.split * rounded), _MOST_RESIDENT) if rounded <= _REGISTERS_OF_THREAD else 0

    def grid(self, rows: int) -> tuple[int, int, int]:
        """The blocks for so many rows."""
        return (self.out_features // self.columns, -(-rows // (16 * self.row_tiles)), 1)

    def most_rows(self, multiprocessors: int) -> int:
        """Rows whose blocks all run at once."""
        return self.resident * multiprocessors // (self.out_features // self.columns) * 16 * self.row_tiles

    def defines(self, dtype: torch.dtype, activation: str, residual: bool) -> dict[str, int]:
        """The macros that the kernel is compiled with."""
        return macros(self, mode=dtype, activation=activation, residual=residual, resident=self.resident)


def few_rows_tilings(in_features: int, out_features: int, norm: bool, shared_limit: int) -> list[FewRowsTiling]:
    """The tilings that fit a layer of few rows, the smallest blocks first; none where its sizes are multiples of no tile."""
    chunks, rest = divmod(in_features, _CHUNK)
    least, most = _CHUNKS_OF_WARP
    splits = [split for split in range(_MOST_WARPS_OF_FEW, 0, -1) if chunks % split == 0 and least <= chunks // split <= most and not rest]
    widths = [columns for columns in _COLUMNS if out_features % columns == 0]
    shapes = product(_ROW_TILES, widths, splits[:1])
    tiles = (FewRowsTiling(in_features, out_features, norm, *shape) for shape in shapes)
    fitting = (tile for tile in tiles if 0 < tile.resident * tile.shared_bytes <= shared_limit)
    return sorted(fitting, key=lambda tile: tile.row_tiles * tile.columns)


@dataclass(frozen=True)
class SomeRowsTiling:
    """Sizes of ``kernels/some_rows.cu``.

    Attributes:
        rows, columns: of a block's tile.
        split: groups of warpgroups, each with its part of the inputs that are in shared memory.
        shares: blocks of a cluster, each with its part of all inputs.
        resident: blocks that a multiprocessor runs at once.
        stages: slots of the ring, of 64 inputs a group.
    """

    kernel: ClassVar[str] = "some_rows"
    in_features: int
    out_features: int
    mode: str
    rows: int
    columns: int
    split: int
    shares: int
    resident: int
    stages: int = 0

    @property
    def warps(self) -> int:
        return self.rows // 16 * self.split

    @property
    def registers(self) -> int:
        """Registers of a thread, estimated: sums, for float32 also products, and all others."""
        return self.columns // 2 * (1 if self.mode in HALVES else 2) + _REGISTERS_BESIDE

    @property
    def inputs(self) -> int:
        """Inputs of a block."""
        return self.in_features // self.shares

    @property
    def steps(self) -> int:
        """How often a slot is filled."""
        return self.inputs // (_SLAB * self.split)

    @property
    def input_bytes(self) -> int:
        """Bytes of an input of a block's rows and columns."""
        of_row, of_output = {"fp32": (4, 4), "tf32": (4, 2)}.get(self.mode, (2, 2))
        return self.rows * of_row + self.columns * of_output

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block: slots, or sums in their place, and vectors of the columns."""
        sums = 4 * self.split * self.rows * _pitch(self.columns)
        return max(self.stages * self.split * _SLAB * self.input_bytes, sums) + 8 * self.columns

    def grid(self, rows: int) -> tuple[int, int, int]:
        """The blocks for so many rows; those of a cluster lie side by side."""
        return (self.out_features // self.columns * self.shares, -(-rows // self.rows), 1)

    def microseconds(self, rows: int, multiprocessors: int) -> float:
        """The time of a launch, estimated: the factors are those that fit 1500 times on an H200 best."""
        across, down, _ = self.grid(rows)
        blocks = across * down
        # No part of the device has room for a whole number of large clusters.
        within_reach = multiprocessors * 10 // 11 if self.shares > 2 else multiprocessors
        waves, busiest = -(-blocks // (within_reach * self.resident)), -(-blocks // within_reach)
        products, read = busiest * self.rows * self.columns * self.inputs, busiest * self.inputs * self.input_bytes
        if self.mode in HALVES:
            return 0.3 + 1.9 * waves + 4.5e-7 * products + 4.6e-6 * read + 1.6 * (self.shares > 1)
        return -1.0 + 2.0 * waves + 1.5e-6 * products + 1.4e-5 * read + 1.7 * (self.shares > 1)

    def defines(self, dtype: torch.dtype, activation: str, residual: bool) -> dict[str, int]:
        """The macros that the kernel is compiled with, in which the mode says the dtype."""
        return macros(self, activation=activation, residual=residual)


def some_rows_tilings(in_features: int, out_features: int, mode: str, shared_limit: int) -> Iterator[SomeRowsTiling]:
    """The tilings that fit a layer of some rows, each with as many stages as fit; none where its sizes are multiples of no tile."""
    for sizes in product(_ROWS, _COLUMNS, _SPLITS, _SHARES, _RESIDENT):
        tile = SomeRowsTiling(in_features, out_features, mode, *sizes)
        if in_features % (_SLAB * tile.split * tile.shares) or out_features % tile.columns:
            continue
        if not (1 if mode in HALVES else _FEWEST_WARPS_OF_FLOATS) <= tile.warps <= _MOST_WARPS:
            continue
        if tile.registers > _MOST_REGISTERS or tile.resident * tile.warps * 32 * tile.registers > _REGISTERS:
            continue
        room = (shared_limit + _RESERVED) // tile.resident - _RESERVED
        stages = (room - 8 * tile.columns) // (tile.split * _SLAB * tile.input_bytes)
        tile = replace(tile, stages=min(stages, tile.steps, _MOST_STAGES))
        if tile.stages >= min(tile.steps, _FEWEST_STAGES) and tile.shared_bytes <= room:
            yield tile


@lru_cache(maxsize=1024)
def most_rows(in_features: int, out_features: int, norm: bool, dtype: torch.dtype, device_index: int) -> int:
    """The most rows for which the kernel for few rows takes a layer: all their blocks run at once. 0 where it does not take the layer.

    For more rows, kernels that read each weight once for many rows are faster.
    """
    if dtype not in HALF_MODES:
        return 0
    tiles = few_rows_tilings(in_features, out_features, norm, shared_limit_of(device_index))
    return max((tile.most_rows(multiprocessors_of(device_index)) for tile in tiles), default=0)


@lru_cache(maxsize=1024)
def most_some_rows(in_features: int, out_features: int, factors: bool, mode: str, device_index: int) -> int:
    """The most rows for which the kernel for some rows is the fastest, by times on an H200; 0 where it does not take the layer.

    Kernels for many rows need nearly the same time for two factors however few the rows are, and less for dense layers.
    """
    tiles = [*some_rows_tilings(in_features, out_features, mode, shared_limit_of(device_index))]
    if mode in HALVES:
        longest = 10.0 if factors else 8.0
    else:
        longest = (30.0 if factors else 15.0) * sqrt(in_features * out_features / (384 * 1536))
    rows, multiprocessors = 0, multiprocessors_of(device_index)
    while tiles and rows < _MOST_ROWS and min(tile.microseconds(rows + _STEP, multiprocessors) for tile in tiles) <= longest:
        rows += _STEP
    return rows


@lru_cache(maxsize=1024)
def _few_tiling(rows: int, in_features: int, out_features: int, norm: bool, device_index: int) -> FewRowsTiling:
    """That of the smallest blocks that all run at once."""
    for tile in few_rows_tilings(in_features, out_features, norm, shared_limit_of(device_index)):
        if rows <= tile.most_rows(multiprocessors_of(device_index)):
            return tile
    raise BackendError(f"the kernel for few rows takes no {rows} rows of {in_features} features to {out_features}")


@lru_cache(maxsize=1024)
def _some_tiling(rows: int, in_features: int, out_features: int, mode: str, device_index: int) -> SomeRowsTiling:
    """That of the shortest estimated time."""
    multiprocessors = multiprocessors_of(device_index)
    tiles = some_rows_tilings(in_features, out_features, mode, shared_limit_of(device_index))
    found = min(tiles, key=lambda tile: (tile.microseconds(rows, multiprocessors), abs(tile.split - _BEST_SPLIT)), default=None)
    if found is None:
        raise BackendError(
            f"the kernel for some hundred rows has no tiling for {in_features} inputs and {out_features} outputs in mode '{mode}'"
        )
    return found


def run_few_rows(
    x: Tensor,  # shape: (rows, in_features)
    norm: Norm | None,
    group: Sequence[Linear],
    activation: str,
    residual: Tensor | None,  # shape: (rows, sum of all out_features)
    scale: Tensor | None,  # shape: (sum of all out_features,)
    mode: str | None = None,
) -> Tensor:  # shape: (rows, sum of all out_features)
    """``residual + activation(scale * group(norm(x)))``, the linears' outputs side by side, in one launch on the current stream.

    Factors are multiplied out in float64 when they are packed, and rounded once; the result takes the memory of a dense layer. For few
    rows the arithmetic that factors save takes no time. Sums and epilogue are float32. Parameters may be wider than x.

    Args:
        mode: that of the kernel for some hundred rows, which takes no norm; None for the kernel for the fewest rows.

    Raises:
        BackendError: the kernel has no tiling for so many rows of the layer, or does not compile or launch.
    """
    device_index = x.device.index
    (rows, in_features), outputs = x.shape, sum([member.sizes[1] for member in group])
    y = fresh((rows, outputs), x.dtype, x.device)
    if rows == 0:
        return y
    if mode is None:
        tile = _few_tiling(rows, in_features, outputs, norm is not None, device_index)
    else:
        tile = _some_tiling(rows, in_features, outputs, mode, device_index)
    norm = norm or Norm(None, None, 0.0)
    sources = present(*[part for member in group for part in member.tensors], *norm.tensors, scale)
    in_place = x.element_size() == 2 and _lies_in_place(group, x.dtype)

    def make() -> tuple[Tensor, ...]:
        of_inputs, of_outputs = _pack_vectors(group, norm, scale, in_features, outputs)
        vectors = (of_inputs, of_outputs) if mode is None else (of_outputs,)
        if in_place:
            return vectors
        dense = _pack_weights(group)
        return (*vectors, dense.to(x.dtype)) if mode is None or x.element_size() == 2 else _pack_floats(dense, of_outputs, mode)

    token = tile.kernel, x.dtype, mode, in_place, *[member.form for member in group], norm.form, scale is None
    packed, early = derived_for_launch(token, sources, make)
    vectors, weight = packed[: 2 if mode is None else 1], sources[0] if in_place else packed[-1]
    x, residual = readable(x), None if residual is None else readable(residual)
    kernel_of(tile, device_index, x.dtype, activation, residual is not None).launch(
        tile.grid(rows),
        (32 * tile.warps, 1, 1),
        tile.shared_bytes,
        current_stream(device_index),
        *(x, weight, *vectors, residual, y, rows, *strides_of(x, residual), *([float_bits(norm.eps)] if mode is None else [])),
        early=early,
    )
    return y


def _lies_in_place(group: Sequence[Linear], dtype: torch.dtype) -> bool:
    """Whether the kernel reads the weights where they lie: those of one dense linear."""
    linear = group[0]
    if len(group) > 1 or not isinstance(linear, Dense):
        return False
    return linear.weight.dtype == dtype and linear.weight.is_contiguous() and linear.weight.data_ptr() % 16 == 0


def _pack_weights(group: Sequence[Linear]) -> Tensor:  # shape: (sum of all out_features, in_features)
    """The matrices of all linears, one below the other, in float64."""
    return torch.cat(
        [
            member.weight.flatten(1).double() if isinstance(member, Dense) else factors_to_dense([each.double() for each in member.factors])
            for member in group
        ]
    )


def _pack_vectors(
    group: Sequence[Linear], norm: Norm, scale: Tensor | None, inputs: int, outputs: int
) -> tuple[Tensor, Tensor]:  # shapes: (2, in_features), (2, out_features)
    """The norm's weight and bias; what sums are multiplied by and what is added then. All float32."""
    first = group[0].tensors[0]
    ones, zeros = partial(first.new_ones, dtype=torch.float32), partial(first.new_zeros, dtype=torch.float32)
    gain = ones(inputs) if norm.weight is None else norm.weight.float()
    offset = zeros(inputs) if norm.bias is None else norm.bias.float()
    factor = ones(outputs) if scale is None else scale.float()
    shift = torch.cat([zeros(member.sizes[1]) if member.bias is None else member.bias.float() for member in group])
    return torch.stack((gain, offset)), torch.stack((factor, shift * factor))


def _pack_floats(
    dense: Tensor,  # shape: (out_features, in_features), float64
    columns: Tensor,  # shape: (2, out_features), float32
    mode: str,
) -> tuple[Tensor, Tensor]:  # shapes: (2, out_features) float32, (out_features, images, in_features) float16
    """The factors and summands of the sums; and the weights as images of fp16, each output with its own scale."""
    scaled, exponent = scaled_rows(dense.float())
    # 16 inputs are (lane, half, 2) in x and (half, lane, 2) here
    turned = scaled.unflatten(1, (-1, 4, 2, 2)).transpose(2, 3).flatten(1)
    factor = torch.ldexp(columns[0], WEIGHT_SHIFT - exponent)
    return torch.stack((factor, columns[1])), torch.stack(in_halves(turned, 1 if mode == "tf32" else 2), dim=1)
