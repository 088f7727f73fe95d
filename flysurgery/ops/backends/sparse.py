"""PyTorch's sparse layouts: a general sparse matrix (CSR), and block compressed sparse rows (BSR) between two permutations."""

from __future__ import annotations

import math
import warnings

import torch
from torch import Tensor
from torch.nn.functional import linear

from flysurgery.factors import pattern_of, to_blocks
from flysurgery.ops.backend import FactorwiseBackend
from flysurgery.ops.problem import Problem
from flysurgery.patterns import Pattern


def sparse_obstacle(problem: Problem) -> str | None:
    """Why PyTorch cannot multiply by a compressed sparse matrix here; None when it can.

    On the CPU it goes through MKL, which knows float32 and float64 only.
    """
    if problem.tracing:
        return "sparse layouts cannot be traced into a graph"
    if problem.device_type not in ("cpu", "cuda"):
        return f"PyTorch has sparse products on cpu and cuda, x is on {problem.device_type}"
    if problem.dtype.is_complex:
        return f"its sparse products of complex numbers are not tested, x is {problem.dtype}"
    if problem.device_type == "cpu":
        if not torch.backends.mkl.is_available():
            return "PyTorch multiplies sparse matrices on the CPU through MKL, which this build lacks"
        if problem.dtype not in (torch.float32, torch.float64):
            return f"MKL multiplies sparse matrices in float32 and float64, x is {problem.dtype}"
    return None


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


_MOST_TILE_BYTES = 1 << 15


def tile_size(b: int, c: int, cuda_dtype: torch.dtype | None) -> int:
    """The rows of a tile: gcd(b, c); on CUDA, where it is a power of two, at most 128 of 16 bits or 64 of 32.

    There PyTorch multiplies powers of two by a Triton kernel that holds several tiles at once: larger ones compile for half a
    minute, and then do not fit, or take tens of times as long.
    """
    tile = math.gcd(b, c)
    if cuda_dtype is not None and tile & (tile - 1) == 0:
        while tile * tile * cuda_dtype.itemsize > _MOST_TILE_BYTES:
            tile //= 2
    return tile


class BsrBackend(FactorwiseBackend):
    """``F.linear`` with the block-diagonal form of each factor in the BSR layout, cut into square tiles.

    MKL and cuSPARSE want square tiles, and b x c blocks are cut into the largest that fit; see ``tile_size``.
    Source: Gonon et al. 2024, arXiv:2405.15013, Algorithm 2.
    """

    name = "bsr"

    def can_run(self, problem: Problem) -> str | None:
        if problem.requires_grad:
            return "PyTorch gives no gradients through BSR matrices"
        if problem.device_type == "cuda" and any(math.gcd(pattern.b, pattern.c) == 1 for pattern in problem.architecture):
            return "PyTorch's BSR products on CUDA need tiles larger than 1x1, and b and c of a pattern have no common divisor"
        return sparse_obstacle(problem)

    def prepare(self, factor: Tensor) -> Tensor:
        a, b, c, d = pattern_of(factor).factor_shape
        tile = tile_size(b, c, factor.dtype if factor.is_cuda else None)
        down, across = b // tile, c // tile
        tiles = to_blocks(factor).view(a * d, down, tile, across, tile).transpose(2, 3).reshape(-1, tile, tile).contiguous()
        count = torch.arange(a * d * down + 1, device=factor.device) * across
        columns = torch.arange(a * d * across, device=factor.device).view(a * d, 1, across).expand(-1, down, -1).flatten()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Sparse (BSR tensor support is in beta|invariant checks are)")
            return torch.sparse_bsr_tensor(count, columns, tiles, (a * d * b, a * d * c), check_invariants=False)

    def multiply(self, x: Tensor, prepared: Tensor, pattern: Pattern) -> Tensor:
        permuted = x.unflatten(-1, (pattern.a, pattern.c, pattern.d)).transpose(2, 3).reshape(x.shape)
        product = linear(permuted, prepared)
        return product.unflatten(-1, (pattern.a, pattern.d, pattern.b)).transpose(2, 3).flatten(1)
