"""Linears of two factors that share x, factor by factor for all of them together."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from flysurgery.errors import BackendError
from flysurgery.factors import architecture_of
from flysurgery.gpu.block_linear import BlockLinear, BlockTiling, block_tiling, blocks_obstacle, blocks_of, outputs_for
from flysurgery.gpu.device import shared_limit_of
from flysurgery.gpu.fused import readable
from flysurgery.gpu.layer_norm import NormParts
from flysurgery.patterns import Architecture, Pattern


def wide_group_obstacle(architecture: Architecture, linears: int, dtype: torch.dtype, device_index: int) -> str | None:
    """Why no kernel multiplies linears of one architecture factor by factor on a device; None when one does."""
    obstacle = blocks_obstacle(dtype)
    if obstacle is not None:
        return obstacle
    tiles = group_tilings(architecture, linears, shared_limit_of(device_index))
    return tiles if isinstance(tiles, str) else None


@lru_cache(maxsize=64)
def group_tilings(architecture: Architecture, linears: int, shared_limit: int) -> tuple[BlockTiling, BlockTiling] | str:
    """The product with all first factors and that with all second ones, or why there are none.

    The first factors together are one factor with more outputs in each block. The second ones together are one factor with more blocks.
    """
    if len(architecture) != 2:
        return f"linears are multiplied factor by factor where they have two factors, these have {len(architecture)}"
    second, first = architecture.patterns
    wide = Pattern(first.a, linears * first.b, first.c, first.d)
    tall = Pattern(linears * second.a, second.b, second.c, second.d)
    block, row = np.divmod(np.arange(wide.out_features) // wide.d, wide.b)
    linear, p = np.divmod(row, first.b)
    inner = linear * first.out_features + (block * first.b + p) * first.d + np.arange(wide.out_features) % wide.d
    order = outputs_for(wide, blocks_of(inner, tall.c, tall.d))
    firsts = block_tiling(wide, range(wide.in_features), order, 1, shared_limit)
    seconds = block_tiling(tall, inner[order], range(tall.out_features), tall.d, shared_limit)
    if isinstance(firsts, str) or isinstance(seconds, str):
        return str(firsts if isinstance(firsts, str) else seconds)
    return firsts, seconds


@lru_cache(maxsize=256)
def _products(architecture: Architecture, linears: int, dtype: torch.dtype, device_index: int) -> tuple[BlockLinear, ...]:
    obstacle = wide_group_obstacle(architecture, linears, dtype, device_index)
    tiles = group_tilings(architecture, linears, shared_limit_of(device_index))
    if obstacle is not None or isinstance(tiles, str):
        raise BackendError(obstacle or str(tiles))
    return tuple(BlockLinear(tile, dtype, "none", device_index) for tile in tiles)


def run_wide_group(
    x: Tensor,  # shape: (rows, in_features)
    norm: NormParts | None,
    factors: Sequence[Tensor],  # shapes: (a, b, c, d), left and right; of several linears one after the other
    biases: Sequence[Tensor],  # shapes: (out_features,), one a linear, or none
    linears: int,
) -> Tensor:  # shape: (rows, linears * out_features)
    """The linears' outputs for ``norm(x)`` side by side: a launch for the norm and one for each factor, on the current stream.

    Raises:
        BackendError: the kernel cannot run this; ``wide_group_obstacle`` tells beforehand.
    """
    device_index = x.device.index
    first, second = _products(architecture_of(factors[:2]), linears, x.dtype, device_index)
    # The second product begins with the rows that were written last and are still in the L2 cache.
    return second.multiply(first.multiply(readable(x), factors[1::2], norm=norm, dim=1), factors[::2], biases, backwards=True)
