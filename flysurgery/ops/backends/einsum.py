"""Tensor contraction on the canonical storage: the definition itself, on any device and dtype."""

from __future__ import annotations

from torch import Tensor

from flysurgery.factors import ks_einsum
from flysurgery.ops.backend import FactorwiseBackend
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
