"""Linears on some hundred rows with an epilogue in one launch, factors multiplied out; and how it divides a layer among blocks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from math import sqrt
from typing import ClassVar

import torch
from torch import Tensor

from flysurgery.errors import BackendError
from flysurgery.gpu.device import multiprocessors_of, shared_limit_of
from flysurgery.gpu.few_rows import lies_in_place, outputs_of, pack_vectors, pack_weights
from flysurgery.gpu.fused_linear import readable
from flysurgery.gpu.kernel import current_stream, kernel_of
from flysurgery.gpu.modes import HALVES, WEIGHT_SHIFT, in_halves, macros, scaled_rows
from flysurgery.gpu.parts import Linear, present
from flysurgery.gpu.replay.recording import fresh
from flysurgery.gpu.weight_cache import derived_for_launch

_SLAB = 64  # inputs
_STEP, _MOST_ROWS = 64, 3200  # rows; more were not timed
_ROWS, _COLUMNS, _SPLITS, _SHARES = (64, 128), (32, 48, 64, 96, 128), (1, 2, 3), (1, 2, 4)
_RESIDENT = (1, 2, 3)
_BEST_SPLIT = 2  # of those whose estimates are equal
_FEWEST_STAGES, _MOST_STAGES = 3, 8
_FEWEST_WARPS_OF_FLOATS, _MOST_WARPS = 8, 16
_REGISTERS, _MOST_REGISTERS, _REGISTERS_BESIDE = 65536, 168, 64
_RESERVED = 1024  # bytes of shared memory that a block takes beside its own


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
        pitch = self.columns + (40 - self.columns % 32) % 32
        return max(self.stages * self.split * _SLAB * self.input_bytes, 4 * self.split * self.rows * pitch) + 8 * self.columns

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

    def defines(self, activation: str, residual: bool) -> dict[str, int]:
        """The macros that the kernel is compiled with."""
        return macros(self, activation=activation, residual=residual)


def some_rows_tilings(in_features: int, out_features: int, mode: str, shared_limit: int) -> Iterator[SomeRowsTiling]:
    """The tilings that fit a layer, each with as many stages as fit; none where its sizes are multiples of no tile."""
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


def some_rows_tiling(rows: int, in_features: int, out_features: int, mode: str, multiprocessors: int, shared_limit: int) -> SomeRowsTiling:
    """The tiling of the shortest estimated time.

    Raises:
        BackendError: there is none.
    """
    tiles = [*some_rows_tilings(in_features, out_features, mode, shared_limit)]
    if not tiles:
        raise BackendError(
            f"the kernel for some hundred rows has no tiling for {in_features} inputs and {out_features} outputs in mode '{mode}'"
        )
    return min(tiles, key=lambda tile: (tile.microseconds(rows, multiprocessors), abs(tile.split - _BEST_SPLIT)))


def most_rows(in_features: int, out_features: int, factors: bool, mode: str, multiprocessors: int, shared_limit: int) -> int:
    """The most rows for which the kernel is the fastest, by times on an H200; 0 where there is no tiling.

    Kernels for many rows need nearly the same time for two factors however few the rows are, and less for dense layers.
    """
    tiles = [*some_rows_tilings(in_features, out_features, mode, shared_limit)]
    if mode in HALVES:
        longest = 10.0 if factors else 8.0
    else:
        longest = (30.0 if factors else 15.0) * sqrt(in_features * out_features / (384 * 1536))
    rows = 0
    while tiles and rows < _MOST_ROWS and min(tile.microseconds(rows + _STEP, multiprocessors) for tile in tiles) <= longest:
        rows += _STEP
    return rows


@lru_cache(maxsize=1024)
def most_some_rows(in_features: int, out_features: int, factors: bool, mode: str, device_index: int) -> int:
    """The most rows for which the kernel is the fastest for a layer, of ``factors`` or dense; 0 where it does not take the layer."""
    limits = multiprocessors_of(device_index), shared_limit_of(device_index)
    return most_rows(in_features, out_features, factors, mode, *limits)


@lru_cache(maxsize=1024)
def _tiling(rows: int, in_features: int, out_features: int, mode: str, device_index: int) -> SomeRowsTiling:
    limits = multiprocessors_of(device_index), shared_limit_of(device_index)
    return some_rows_tiling(rows, in_features, out_features, mode, *limits)


def run_some_rows(
    x: Tensor,  # shape: (rows, in_features)
    group: Sequence[Linear],
    activation: str,
    residual: Tensor | None,  # shape: (rows, sum of all out_features)
    scale: Tensor | None,  # shape: (sum of all out_features,)
    mode: str,
) -> Tensor:  # shape: (rows, sum of all out_features)
    """``residual + activation(scale * group(x))``, the linears' outputs side by side, in one launch on the current stream.

    Factors are multiplied out when they are packed, in float64, and rounded once, into the memory of a dense layer. Sums and epilogue
    are float32. Parameters may be wider than x.

    Raises:
        BackendError: there is no tiling for the layer, or the kernel does not compile or launch.
    """
    device_index = x.device.index
    (rows, in_features), outputs = x.shape, outputs_of(group)
    y = fresh((rows, outputs), x.dtype, x.device)
    if rows == 0:
        return y
    tile = _tiling(rows, in_features, outputs, mode, device_index)
    sources = present(*[part for member in group for part in member.tensors], scale)
    in_place = x.element_size() == 2 and lies_in_place(group, x.dtype)

    def make() -> tuple[Tensor, ...]:
        _, columns = pack_vectors(group, (None, None), scale, in_features)
        if in_place:
            return (columns,)
        dense = pack_weights(group)
        return (columns, dense.to(x.dtype)) if x.element_size() == 2 else pack_floats(dense, columns, mode)

    token = ("some rows", mode, in_place, *[member.form for member in group], scale is None)
    (columns, *packed), early = derived_for_launch(token, sources, make)
    x, residual = readable(x), None if residual is None else readable(residual)
    strides = [0 if part is None else part.stride(0) * part.element_size() for part in (x, residual)]
    kernel_of(tile, device_index, activation, residual is not None).launch(
        tile.grid(rows),
        (32 * tile.warps, 1, 1),
        tile.shared_bytes,
        current_stream(device_index),
        *(x, packed[0] if packed else sources[0], columns, residual, y, rows, *strides),
        early=early,
    )
    return y


def pack_floats(
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
