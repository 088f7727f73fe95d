"""How the kernel for some hundred rows divides a layer among blocks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from math import sqrt

from flysurgery.errors import BackendError
from flysurgery.gpu.fused import ACTIVATIONS
from flysurgery.gpu.modes import HALVES, MODE_NUMBERS

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
        return {
            "IN": self.in_features,
            "OUT": self.out_features,
            "MODE": MODE_NUMBERS[self.mode],
            "ACTIVATION": ACTIVATIONS.index(activation),
            "RESIDUAL": int(residual),
            "ROWS": self.rows,
            "COLUMNS": self.columns,
            "SPLIT": self.split,
            "SHARES": self.shares,
            "STAGES": self.stages,
            "RESIDENT": self.resident,
        }


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
