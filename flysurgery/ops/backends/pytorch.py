"""The backends of one operator of PyTorch's: a contraction, a batched product of blocks, and a dense product."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import linear

from flysurgery.factors import factors_to_dense, ks_einsum, to_blocks
from flysurgery.ops.backend import Backend, FactorwiseBackend
from flysurgery.ops.problem import Problem
from flysurgery.patterns import Pattern


class EinsumBackend(FactorwiseBackend):
    """``torch.einsum`` on (rows, a, c, d) and (a, b, c, d). Source: Gonon et al. 2024, arXiv:2405.15013, Section 2.2."""

    name = "einsum"

    def can_run(self, problem: Problem) -> str | None:
        return None

    def advise_against(self, problem: Problem) -> str | None:
        return "bmm is faster on the CPU" if problem.device_type == "cpu" else None

    def prepare(self, factor: Tensor) -> Tensor:
        return factor

    def multiply(self, x: Tensor, prepared: Tensor, pattern: Pattern) -> Tensor:
        return ks_einsum(x, prepared)


class BmmBackend(FactorwiseBackend):
    """``torch.bmm``; x and y are copied into and out of the order of the blocks where d > 1.

    Source: Gonon et al. 2024, arXiv:2405.15013, Algorithm 2.
    """

    name = "bmm"

    def can_run(self, problem: Problem) -> str | None:
        return None

    def prepare(self, factor: Tensor) -> Tensor:
        return to_blocks(factor)

    def multiply(self, x: Tensor, prepared: Tensor, pattern: Pattern) -> Tensor:
        a, b, c, d = pattern.factor_shape
        by_block = x.reshape(-1, a, c, d).permute(1, 3, 0, 2).reshape(a * d, -1, c)
        product = torch.bmm(by_block, prepared.transpose(1, 2))  # shape: (a*d, rows, b)
        return product.view(a, d, -1, b).permute(2, 0, 3, 1).reshape(-1, a * b * d)


class DenseBackend(Backend):
    """``F.linear`` with the densified product. Without ``bind`` it densifies at every call, which costs more than it saves."""

    name = "dense"

    def can_run(self, problem: Problem) -> str | None:
        return None

    def linear(self, x: Tensor, factors: Sequence[Tensor], bias: Tensor | None) -> Tensor:
        return linear(x, factors_to_dense(factors), bias)

    def bind(self, factors: Sequence[Tensor], bias: Tensor | None) -> Callable[[Tensor], Tensor]:
        return partial(linear, weight=factors_to_dense(factors), bias=bias)
