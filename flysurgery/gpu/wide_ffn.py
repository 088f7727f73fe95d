"""A feed-forward block of two butterfly layers factor by factor, for widths that no kernel takes in one launch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from flysurgery.errors import BackendError
from flysurgery.factors import architecture_of
from flysurgery.gpu.block_linear import BlockLinear, BlockTiling, block_tiling, blocks_obstacle, blocks_of, outputs_for
from flysurgery.gpu.device import multiprocessors_of, shared_limit_of
from flysurgery.gpu.ffn_middle import WARPGROUPS, FfnMiddle, MiddleTiling, fills_rounds, middle_tiling
from flysurgery.gpu.fused import readable
from flysurgery.gpu.layer_norm import NormParts
from flysurgery.patterns import Architecture, Pattern


def wide_ffn_obstacle(up: Architecture, down: Architecture, dtype: torch.dtype, device_index: int) -> str | None:
    """Why no kernel multiplies a block factor by factor on a device; None when one does."""
    obstacle = blocks_obstacle(dtype)
    if obstacle is not None:
        return obstacle
    tiles = wide_tilings(up, down, shared_limit_of(device_index))
    return tiles if isinstance(tiles, str) else None


@lru_cache(maxsize=64)
def wide_tilings(up: Architecture, down: Architecture, shared_limit: int) -> tuple[BlockTiling, ...] | str:
    """The four products in the order of use, or why there are none.

    The order of the values between two products is free. Outputs of a first factor are sorted by the block of the second factor that reads
    them, and hidden units by the block that computed them. So only the outputs of the last factor alternate.
    """
    if len(up) != 2 or len(down) != 2:
        return f"a block is multiplied factor by factor where both layers have two, these have {len(up)} and {len(down)}"
    (second, first), (last, third) = up.patterns, down.patterns
    middle, hidden, narrow = _sorted(first, second), _sorted(second, third), _sorted(third, last)
    made = (
        block_tiling(first, range(first.in_features), middle, 1, shared_limit),
        block_tiling(second, middle, hidden, 1, shared_limit),
        block_tiling(third, hidden, narrow, 1, shared_limit),
        block_tiling(last, narrow, range(last.out_features), last.d, shared_limit),
    )
    wrong = next((tile for tile in made if isinstance(tile, str)), None)
    return wrong or tuple(tile for tile in made if isinstance(tile, BlockTiling))


@lru_cache(maxsize=64)
def wide_middle(up: Architecture, down: Architecture, shared_limit: int) -> MiddleTiling | str:
    """The product with the two factors around the activation in one launch, or why there is none; ordered as in ``wide_tilings``."""
    tiles = wide_tilings(up, down, shared_limit)
    if isinstance(tiles, str):
        return tiles
    _, second, third, _ = tiles
    return middle_tiling(second.factor, third.factor, second.inputs, third.outputs, shared_limit)


@lru_cache(maxsize=256)
def middle_places(up: Architecture, down: Architecture, device_index: int) -> int:
    """Warpgroups in a round of the kernel for both factors around the activation; 0 where there is no kernel."""
    tile = wide_middle(up, down, shared_limit_of(device_index))
    return 0 if isinstance(tile, str) else WARPGROUPS * multiprocessors_of(device_index)


def _sorted(factor: Pattern, following: Pattern) -> np.ndarray:  # shape: (out_features,)
    return outputs_for(factor, blocks_of(np.arange(factor.out_features), following.c, following.d))


@lru_cache(maxsize=256)
def _products(up: Architecture, down: Architecture, dtype: torch.dtype, activation: str, device_index: int) -> tuple[BlockLinear, ...]:
    obstacle = wide_ffn_obstacle(up, down, dtype, device_index)
    tiles = wide_tilings(up, down, shared_limit_of(device_index))
    if obstacle is not None or isinstance(tiles, str):
        raise BackendError(obstacle or str(tiles))
    activations = ("none", activation, "none", "none")
    return tuple(BlockLinear(tile, dtype, each, device_index) for tile, each in zip(tiles, activations, strict=True))


@lru_cache(maxsize=256)
def _middle(up: Architecture, down: Architecture, dtype: torch.dtype, activation: str, device_index: int) -> FfnMiddle:
    tile = wide_middle(up, down, shared_limit_of(device_index))
    if isinstance(tile, str):
        raise BackendError(tile)
    return FfnMiddle(tile, dtype, activation, device_index)


def run_wide_ffn(
    x: Tensor,  # shape: (rows, in_features)
    norm: NormParts | None,
    up: Sequence[Tensor],
    up_bias: Tensor | None,
    down: Sequence[Tensor],
    down_bias: Tensor | None,
    activation: str,
    scale: Tensor | None,
    residual: bool,
    moments: Tensor | None = None,  # shape: (rows, parts, 2), float32
) -> Tensor:  # shape: (rows, out_features)
    """``x + scale * down(activation(up(norm(x))))``, without ``x +`` where ``residual`` is false: a launch for the norm and one for each
    factor. The two factors around the activation share a launch where rows fill the rounds of their kernel.

    With ``moments``, as ``BlockLinear.multiply`` takes them, the norm needs no launch.

    Raises:
        BackendError: the kernel cannot run this; ``wide_ffn_obstacle`` tells beforehand.
    """
    device_index = x.device.index
    kind = architecture_of(up), architecture_of(down), x.dtype, activation, device_index
    first, second, third, last = _products(*kind)
    up_biases, down_biases = (() if bias is None else (bias,) for bias in (up_bias, down_bias))
    x = readable(x)
    u = first.multiply(x, up[1:], norm=norm, moments=moments)
    # Every second product goes backwards: it begins with the rows that were written last and are still in the L2 cache.
    if fills_rounds(x.shape[0], middle_places(*kind[:2], device_index)):
        v = _middle(*kind).multiply(u, up[0], up_bias, down[1])
    else:
        v = third.multiply(second.multiply(u, up[:1], up_biases, backwards=True), down[1:])
    return last.multiply(v, down[:1], down_biases, scale, x if residual else None, backwards=True)
