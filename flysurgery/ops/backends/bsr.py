"""Block compressed sparse rows: a block-diagonal matrix between two permutations."""

from __future__ import annotations

import math
import warnings

import torch
from torch import Tensor
from torch.nn.functional import linear

from flysurgery.factors import pattern_of, to_blocks
from flysurgery.ops.backend import FactorwiseBackend
from flysurgery.ops.backends.sparse_support import sparse_obstacle
from flysurgery.ops.problem import Problem
from flysurgery.patterns import Pattern

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
