"""The kernels that multiply by a dense matrix, so that each can be called, and tested, in the same way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from torch import Tensor

from flysurgery.gpu import some_rows
from flysurgery.gpu.dense import run_dense
from flysurgery.gpu.device import multiprocessors_of, shared_limit_of
from flysurgery.gpu.few_rows import run_few_rows
from flysurgery.gpu.parts import Dense, FusedFactors
from flysurgery.gpu.some_rows import SomeRowsTiling, run_some_rows, some_rows_tiling, some_rows_tilings
from flysurgery.patterns import Pattern
from tests.support.tolerance import ARITHMETICS, Arithmetic

SQUARE = Pattern(1, 384, 384, 1)
FEW_ROWS = 256
"""As many as the kernel for few rows takes at a time, of every layer here."""
Tile = tuple[int, int, int, int]
"""Rows and columns of a block of the kernel for some hundred rows, groups of warpgroups, and blocks that share the inputs."""
TILES: dict[str, tuple[Tile, ...]] = {
    "fp16": ((64, 32, 3, 2), (128, 96, 2, 2)),
    "bf16": ((64, 48, 1, 4),),
    "tf32": ((64, 32, 3, 2),),
    "fp32": ((128, 96, 1, 2), (64, 48, 2, 4)),
}


@dataclass(frozen=True)
class DenseKernel:
    """A kernel in one mode.

    Attributes:
        kind: the kernel for ``"any rows"``, ``"few rows"`` or ``"some rows"``.
        tile: of ``"some rows"``, None where it chooses its own.
        patterns: layers to try it on, each the factor (1, outputs, inputs, 1).
        rows: numbers of rows that differ in how they are divided among blocks.
    """

    kind: str
    mode: str
    tile: Tile | None
    patterns: tuple[Pattern, ...]
    rows: tuple[int, ...]

    def __str__(self) -> str:
        return "-".join((self.kind, *([] if self.tile is None else ["x".join(map(str, self.tile))]), self.mode))

    @property
    def arithmetic(self) -> Arithmetic:
        return ARITHMETICS[self.mode]

    def take_tile(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """See to it that the kernel takes its tile."""
        if self.tile is not None:
            monkeypatch.setattr(some_rows, "_tiling", partial(_by_tile, self.tile))

    def linears(
        self,
        x: Tensor,
        weights: Sequence[Tensor | Sequence[Tensor]],
        biases: Sequence[Tensor | None],
        activation: str = "none",
        residual: Tensor | None = None,
        scale: Tensor | None = None,
    ) -> Tensor:
        """What ``run_some_rows`` says; the kernel for any number of rows takes one dense layer, that for few rows few at a time."""
        group = [Dense(w, b) if isinstance(w, Tensor) else FusedFactors(tuple(w), b) for w, b in zip(weights, biases, strict=True)]
        if self.kind == "some rows":
            return run_some_rows(x, group, activation, residual, scale, self.mode)
        if self.kind == "few rows":
            parts = x.split(FEW_ROWS)
            added = [None] * len(parts) if residual is None else residual.split(FEW_ROWS)
            pairs = zip(parts, added, strict=True)
            return torch.cat([run_few_rows(part, None, group, activation, each, scale) for part, each in pairs])
        (linear,) = group
        assert isinstance(linear, Dense)
        return run_dense(x, linear, activation, residual, scale, self.mode)

    def linear(
        self,
        x: Tensor,
        factor: Tensor,  # shape: (1, out_features, in_features, 1)
        bias: Tensor | None = None,
        activation: str = "none",
        residual: Tensor | None = None,
        scale: Tensor | None = None,
    ) -> Tensor:
        """One dense layer."""
        return self.linears(x, [factor[0, :, :, 0]], [bias], activation, residual, scale)

    def run(self, x: Tensor, factors: Sequence[Tensor], bias: Tensor | None) -> Tensor:
        """By one factor as a dense weight, by several as factors."""
        return self.linear(x, factors[0], bias) if len(factors) == 1 else self.linears(x, [factors], [bias])


def _kernels() -> tuple[DenseKernel, ...]:
    # any number of rows: once round the multiprocessors, and often, with one row in the last tile
    found = [DenseKernel("any rows", mode, None, (SQUARE, Pattern(1, 96, 768, 1)), (197, 25217)) for mode in ARITHMETICS]
    sizes = (SQUARE, Pattern(1, 1536, 384, 1), Pattern(1, 384, 1536, 1), Pattern(1, 96, 192, 1))
    found += [DenseKernel("few rows", mode, None, sizes, (65, 197)) for mode in ("fp16", "bf16")]
    for mode in ARITHMETICS:
        for tile in (None, *TILES[mode]):
            fitting = tuple(size for size in (SQUARE, Pattern(1, 96, 1536, 1)) if tile is None or _fits(tile, size))
            found.append(DenseKernel("some rows", mode, tile, fitting, (197, 1009)))
    return tuple(found)


def _fits(tile: Tile, size: Pattern) -> bool:
    _, columns, split, shares = tile
    return size.b % columns == 0 and size.c % (64 * split * shares) == 0


def _by_tile(tile: Tile, rows: int, in_features: int, out_features: int, mode: str, device_index: int) -> SomeRowsTiling:
    """The tiling of these sizes, or, of layers whose sizes are no multiples of them, the one that is chosen."""
    limits = multiprocessors_of(device_index), shared_limit_of(device_index)
    tilings = some_rows_tilings(in_features, out_features, mode, limits[1])
    found = [each for each in tilings if (each.rows, each.columns, each.split, each.shares) == tile]
    return found[0] if found else some_rows_tiling(rows, in_features, out_features, mode, *limits)


KERNELS = _kernels()
