"""Batched matrix product over the a*d dense blocks, with a permutation before and after."""

from __future__ import annotations

import torch
from torch import Tensor

from flysurgery.factors import to_blocks
from flysurgery.ops.backend import FactorwiseBackend
from flysurgery.ops.problem import Problem
from flysurgery.patterns import Pattern


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
