"""Feed-forward blocks, and linears that share x, factor by factor, for widths that no kernel takes in one launch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flysurgery.errors import BackendError
from flysurgery.gpu.block_linear import BlockLinear, BlockTiling, block_tiling, blocks_of, outputs_for
from flysurgery.gpu.device import multiprocessors_of, shared_limit_of
from flysurgery.gpu.ffn_middle import WARPGROUPS, FfnMiddle, MiddleTiling, fills_rounds, middle_tiling
from flysurgery.gpu.fused_linear import readable
from flysurgery.gpu.modes import HALF_MODES
from flysurgery.gpu.parts import FusedFactors, Norm, present
from flysurgery.patterns import Architecture, Pattern

BlockTilings = tuple[BlockTiling, ...]


def wide_ffn_obstacle(up: Architecture, down: Architecture, dtype: torch.dtype, device_index: int) -> str | None:
    """Why no kernel multiplies a block factor by factor on a device; None when one does."""
    return _dtype_obstacle(dtype) or _reason(wide_tilings(up, down, shared_limit_of(device_index)))


def wide_group_obstacle(architecture: Architecture, linears: int, dtype: torch.dtype, device_index: int) -> str | None:
    """Why no kernel multiplies linears of one architecture factor by factor on a device; None when one does."""
    return _dtype_obstacle(dtype) or _reason(group_tilings(architecture, linears, shared_limit_of(device_index)))


def _dtype_obstacle(dtype: torch.dtype) -> str | None:
    return None if dtype in HALF_MODES else f"the kernel of dense blocks takes float16 and bfloat16, not {dtype}"


def _reason(tiles: BlockTilings | str) -> str | None:
    return tiles if isinstance(tiles, str) else None


@lru_cache(maxsize=64)
def wide_tilings(up: Architecture, down: Architecture, shared_limit: int) -> BlockTilings | str:
    """The four products in the order of use, or why there are none.

    The order of the values between two products is free. Outputs of a first factor are sorted by the block of the second factor that reads
    them, and hidden units by the block that computed them. So only the outputs of the last factor alternate.
    """
    if len(up) != 2 or len(down) != 2:
        return f"a block is multiplied factor by factor where both layers have two, these have {len(up)} and {len(down)}"
    (second, first), (last, third) = up.patterns, down.patterns
    middle, hidden, narrow = _sorted(first, second), _sorted(second, third), _sorted(third, last)
    return _all_or_reason(
        block_tiling(first, range(first.in_features), middle, 1, shared_limit),
        block_tiling(second, middle, hidden, 1, shared_limit),
        block_tiling(third, hidden, narrow, 1, shared_limit),
        block_tiling(last, narrow, range(last.out_features), last.d, shared_limit),
    )


def _all_or_reason(*made: BlockTiling | str) -> BlockTilings | str:
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
def _products(
    make: Callable[..., BlockTilings | str], of: tuple[Any, ...], dtype: torch.dtype, activations: tuple[str, ...], device_index: int
) -> tuple[BlockLinear, ...]:
    """The products of the tilings ``make(*of, shared_limit)``."""
    obstacle, tiles = _dtype_obstacle(dtype), make(*of, shared_limit_of(device_index))
    if obstacle is not None or isinstance(tiles, str):
        raise BackendError(obstacle or str(tiles))
    return tuple(BlockLinear(tile, dtype, activation, device_index) for tile, activation in zip(tiles, activations, strict=True))


@lru_cache(maxsize=256)
def _middle(up: Architecture, down: Architecture, dtype: torch.dtype, activation: str, device_index: int) -> FfnMiddle:
    tile = wide_middle(up, down, shared_limit_of(device_index))
    if isinstance(tile, str):
        raise BackendError(tile)
    return FfnMiddle(tile, dtype, activation, device_index)


def run_wide_ffn(
    x: Tensor,  # shape: (rows, in_features)
    norm: Norm | None,
    up: FusedFactors,
    down: FusedFactors,
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
    of = up.architecture, down.architecture
    first, second, third, last = _products(wide_tilings, of, x.dtype, ("none", activation, "none", "none"), device_index)
    up_biases, down_biases = present(up.bias), present(down.bias)
    x = readable(x)
    u = first.multiply(x, up.factors[1:], norm=norm, moments=moments)
    # Every second product goes backwards: it begins with the rows that were written last and are still in the L2 cache.
    if fills_rounds(x.shape[0], middle_places(*of, device_index)):
        v = _middle(*of, x.dtype, activation, device_index).multiply(u, up.factors[0], up.bias, down.factors[1])
    else:
        v = third.multiply(second.multiply(u, up.factors[:1], up_biases, backwards=True), down.factors[1:])
    return last.multiply(v, down.factors[:1], down_biases, scale, x if residual else None, backwards=True)


@lru_cache(maxsize=64)
def group_tilings(architecture: Architecture, linears: int, shared_limit: int) -> BlockTilings | str:
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
    return _all_or_reason(firsts, seconds)


def run_wide_group(
    x: Tensor,  # shape: (rows, in_features)
    norm: Norm | None,
    group: Sequence[FusedFactors],  # of one architecture, with a bias each or none
) -> Tensor:  # shape: (rows, linears * out_features)
    """The linears' outputs for ``norm(x)`` side by side: a launch for the norm and one for each factor, on the current stream.

    Raises:
        BackendError: the kernel cannot run this; ``wide_group_obstacle`` tells beforehand.
    """
    device_index = x.device.index
    first, second = _products(group_tilings, (group[0].architecture, len(group)), x.dtype, ("none", "none"), device_index)
    lefts, rights = zip(*[member.factors for member in group], strict=True)
    biases = present(*[member.bias for member in group])
    # The second product begins with the rows that were written last and are still in the L2 cache.
    return second.multiply(first.multiply(readable(x), rights, norm=norm, dim=1), lefts, biases, backwards=True)
