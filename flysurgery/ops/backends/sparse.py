"""A general sparse matrix (CSR), which knows the zeros but not their structure."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor
from torch.nn.functional import linear

from flysurgery.factors import pattern_of
from flysurgery.ops.backend import FactorwiseBackend
from flysurgery.ops.backends.sparse_support import sparse_obstacle
from flysurgery.ops.problem import Problem
from flysurgery.patterns import Pattern


class SparseBackend(FactorwiseBackend):
    """``F.linear`` with each factor in the CSR layout.

    On a CUDA device cuSPARSE sums in no fixed order: two calls may differ in the last bits.
    Source: Gonon et al. 2024, arXiv:2405.15013, Section 2.2.
    """

    name = "sparse"

    def can_run(self, problem: Problem) -> str | None:
        if problem.device_type == "cuda" and problem.dtype in (torch.float16, torch.bfloat16):
            return "cuSPARSE rounds the partial sums of CSR products to 16 bits"
        if problem.device_type == "cuda" and problem.requires_grad:
            return "PyTorch gives no gradients through CSR products on CUDA"
        return sparse_obstacle(problem)

    def prepare(self, factor: Tensor) -> Tensor:
        a, b, c, d = pattern_of(factor).factor_shape
        count = torch.arange(a * b * d + 1, device=factor.device) * c
        block, residue, column = (torch.arange(size, device=factor.device) for size in (a, d, c))
        columns = (block.view(a, 1, 1, 1) * c + column) * d + residue.view(1, 1, d, 1)  # shape: (a, 1, d, c)
        values = factor.permute(0, 1, 3, 2).flatten()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Sparse (CSR tensor support is in beta|invariant checks are)")
            return torch.sparse_csr_tensor(
                count, columns.expand(a, b, d, c).flatten(), values, pattern_of(factor).shape, check_invariants=False
            )

    def multiply(self, x: Tensor, prepared: Tensor, pattern: Pattern) -> Tensor:
        return linear(x, prepared)
