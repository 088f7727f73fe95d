"""The kernels that multiply by a dense matrix, so that each can be called, and tested, in the same way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flysurgery.gpu.dense import run_dense
from flysurgery.gpu.few_rows import run_few_rows
from flysurgery.gpu.parts import Dense, FusedFactors
from flysurgery.gpu.some_rows import run_some_rows
from flysurgery.patterns import Pattern
from tests.support.tolerance import ARITHMETICS, Arithmetic

SQUARE = Pattern(1, 384, 384, 1)
FEW_ROWS = 256
"""As many as the kernel for few rows takes at a time, of every layer here."""


@dataclass(frozen=True)
class DenseKernel:
    """A kernel in one mode.

    Attributes:
        kind: the kernel for ``"any rows"``, ``"few rows"`` or ``"some rows"``.
        patterns: layers to try it on, each the factor (1, outputs, inputs, 1).
        rows: numbers of rows that differ in how they are divided among blocks.
    """

    kind: str
    mode: str
    patterns: tuple[Pattern, ...]
    rows: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.kind}-{self.mode}"

    @property
    def arithmetic(self) -> Arithmetic:
        return ARITHMETICS[self.mode]

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
    found = [DenseKernel("any rows", mode, (SQUARE, Pattern(1, 96, 768, 1)), (197, 25217)) for mode in ARITHMETICS]
    sizes = (SQUARE, Pattern(1, 1536, 384, 1), Pattern(1, 384, 1536, 1))
    found += [DenseKernel("few rows", mode, (*sizes, Pattern(1, 96, 192, 1)), (65, 197)) for mode in ("fp16", "bf16")]
    # some rows: of these sizes some are divided among blocks that share the inputs, and some are not
    found += [DenseKernel("some rows", mode, (*sizes, Pattern(1, 96, 1536, 1)), (197, 1009)) for mode in ARITHMETICS]
    return tuple(found)


KERNELS = _kernels()
