"""Feed-forward blocks, and linears that share x, factor by factor, for widths that no kernel takes in one launch (halves)."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from flysurgery.errors import BackendError
from flysurgery.gpu.block_linear import BlockTiling, block_tiling, blocks_of, multiply_blocks, outputs_for, pack_blocks
from flysurgery.gpu.device import multiprocessors_of, shared_limit_of
from flysurgery.gpu.fused_linear import readable
from flysurgery.gpu.kernel import current_stream, kernel_of
from flysurgery.gpu.modes import HALF_MODES, macros
from flysurgery.gpu.operands import FusedFactors, Norm, present
from flysurgery.gpu.recording import fresh, rely_on
from flysurgery.gpu.tensor_map import boxes
from flysurgery.gpu.weight_cache import derived_for_launch
from flysurgery.patterns import Architecture, Pattern

BlockTilings = tuple[BlockTiling, ...]

_WARPGROUPS, _ROWS_OF_WARPGROUP = 3, 64
_COLUMNS, _STAGE = 128, 64
_PANEL_BYTES = _STAGE * _COLUMNS * 2
_MAX_SLOTS, _FEWEST_SLOTS = 6, 4


def wide_ffn_obstacle(up: Architecture, down: Architecture, dtype: torch.dtype, device_index: int) -> str | None:
    """Why no kernel multiplies a block factor by factor on a device; None when one does."""
    return _obstacle(wide_tilings(up, down, shared_limit_of(device_index)), dtype)


def wide_group_obstacle(architecture: Architecture, linears: int, dtype: torch.dtype, device_index: int) -> str | None:
    """Why no kernel multiplies linears of one architecture factor by factor on a device; None when one does."""
    return _obstacle(group_tilings(architecture, linears, shared_limit_of(device_index)), dtype)


def _obstacle(tiles: BlockTilings | str, dtype: torch.dtype) -> str | None:
    if dtype not in HALF_MODES:
        return f"the kernel of dense blocks takes float16 and bfloat16, not {dtype}"
    return tiles if isinstance(tiles, str) else None


def _taken(tiles: BlockTilings | str, dtype: torch.dtype) -> BlockTilings:
    obstacle = _obstacle(tiles, dtype)
    if obstacle is not None or isinstance(tiles, str):
        raise BackendError(obstacle or str(tiles))
    return tiles


@lru_cache(maxsize=256)
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


@lru_cache(maxsize=256)
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
    return _all_or_reason(
        block_tiling(wide, range(wide.in_features), order, 1, shared_limit),
        block_tiling(tall, inner[order], range(tall.out_features), tall.d, shared_limit),
    )


def _sorted(factor: Pattern, following: Pattern) -> np.ndarray:  # shape: (out_features,)
    return outputs_for(factor, blocks_of(np.arange(factor.out_features), following.c, following.d))


def _all_or_reason(*made: BlockTiling | str) -> BlockTilings | str:
    wrong = next((tile for tile in made if isinstance(tile, str)), None)
    return wrong or tuple(tile for tile in made if isinstance(tile, BlockTiling))


def run_wide_ffn(
    x: Tensor,  # shape: (rows, in_features)
    norm: Norm | None,
    up: FusedFactors,
    down: FusedFactors,
    activation: str,
    scale: Tensor | None,
    residual: Tensor | None,  # shape: (rows, out_features)
    moments: Tensor | None = None,  # shape: (rows, parts, 2), float32
) -> tuple[Tensor, Tensor]:  # shapes: (rows, out_features), (rows, narrow)
    """``residual + scale * down(activation(up(norm(x))))``: a launch for the norm and one for each factor.

    The two factors around the activation share a launch where rows fill the rounds of their kernel.
    With ``moments``, as ``multiply_blocks`` takes them, the norm needs no launch. The second result is what the
    third factor makes, in the order of ``wide_tilings``.

    Raises:
        BackendError: the kernel cannot run this; ``wide_ffn_obstacle`` tells beforehand.
    """
    kinds, limit = (up.architecture, down.architecture), shared_limit_of(x.device.index)
    first, second, third, last = _taken(wide_tilings(*kinds, limit), x.dtype)
    given, x = x, readable(x)
    residual = x if residual is given else None if residual is None else readable(residual)
    u = multiply_blocks(first, x, up.factors[1:], norm=norm, moments=moments)
    # Every second product goes backwards: it begins with the rows that were written last and are still in the L2 cache.
    joined = fills_rounds(x.shape[0], middle_places(*kinds, x.device.index))
    if joined and not isinstance(middle := wide_middle(*kinds, limit), str):
        v = multiply_middle(middle, u, up.factors[0], up.bias, down.factors[1], activation)
    else:
        hidden = multiply_blocks(second, u, up.factors[:1], present(up.bias), activation=activation, backwards=True)
        v = multiply_blocks(third, hidden, down.factors[1:])
    return multiply_blocks(last, v, down.factors[:1], present(down.bias), scale, residual, backwards=True), v


def run_wide_group(
    x: Tensor,  # shape: (rows, in_features)
    norm: Norm | None,
    group: Sequence[FusedFactors],  # of one architecture, with a bias each or none
) -> Tensor:  # shape: (rows, linears * out_features)
    """The linears' outputs for ``norm(x)`` side by side: a launch for the norm and one for each factor, on the current stream.

    Raises:
        BackendError: the kernel cannot run this; ``wide_group_obstacle`` tells beforehand.
    """
    tiles = group_tilings(group[0].architecture, len(group), shared_limit_of(x.device.index))
    first, second = _taken(tiles, x.dtype)
    lefts, rights = zip(*[member.factors for member in group], strict=True)
    biases = present(*[member.bias for member in group])
    # The second product begins with the rows that were written last and are still in the L2 cache.
    return multiply_blocks(second, multiply_blocks(first, readable(x), rights, norm=norm, dim=1), lefts, biases, backwards=True)


@dataclass(frozen=True, eq=False)
class MiddleTiling:
    """Sizes of ``kernels/ffn_middle.cu``, the two factors around the activation in one launch.

    Attributes:
        up, down: the factors' products, in tiles of 128 outputs: pieces of hidden units in the order of use, blocks of the result.
        classes: of the factor ``up``; one after the other is in shared memory.
        slots: panels of weights in shared memory.
    """

    kernel: ClassVar[str] = "ffn_middle"
    up: BlockTiling
    down: BlockTiling
    classes: int
    slots: int

    @property
    def pieces(self) -> int:
        """Pieces of hidden units of a class that a block of the result reads."""
        return self.up.tiles // (self.classes * self.down.tiles)

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block."""
        stretches = _WARPGROUPS * self.up.steps
        return stretches * (_STAGE * _ROWS_OF_WARPGROUP * 2 + 16) + self.slots * (_PANEL_BYTES + 16)

    def defines(self, dtype: torch.dtype, activation: str) -> dict[str, int]:
        """The macros that the kernel is compiled with."""
        sizes = {"classes": self.classes, "stages": self.up.steps, "a3": self.down.tiles, "pieces": self.pieces, "slots": self.slots}
        return macros(mode=dtype, activation=activation, **sizes)


@lru_cache(maxsize=256)
def wide_middle(up: Architecture, down: Architecture, shared_limit: int) -> MiddleTiling | str:
    """The product with the two factors around the activation in one launch, or why there is none; ordered as in ``wide_tilings``."""
    tiles = wide_tilings(up, down, shared_limit)
    if isinstance(tiles, str):
        return tiles
    second, third = tiles[1].factor, tiles[2].factor
    share = third.c // second.d
    if second.a != 1 or third.d != 1 or third.b != _COLUMNS or third.c % second.d or share % _COLUMNS or second.c % _STAGE:
        return f"no kernel multiplies by {second} and {third} in one launch: it takes whole stages of {_STAGE} inputs, blocks of {_COLUMNS}"
    units = np.arange(third.in_features).reshape(third.a, share // _COLUMNS, _COLUMNS, second.d)
    hidden = units.transpose(3, 0, 1, 2).reshape(-1, _COLUMNS)  # a class, a block, a piece
    upper = BlockTiling(second, tiles[1].inputs, tuple(map(int, hidden.ravel())), 1, _COLUMNS)
    lower = BlockTiling(third, tuple(map(int, hidden[:, upper.place].ravel())), tiles[2].outputs, 1, _COLUMNS)
    first = upper.pieces.reshape(upper.tiles, -1, 8)
    if upper.steps * _STAGE != second.c or (np.diff(first) != 1).any() or (first[..., 0] % 8).any() or (first < 0).any():
        return f"the inputs of {second} do not lie in stretches of {_STAGE}"
    for slots in range(_MAX_SLOTS, _FEWEST_SLOTS - 1, -1):
        tile = MiddleTiling(upper, lower, second.d, slots)
        if tile.shared_bytes <= shared_limit:
            return tile
    return f"{second.c} columns of {_WARPGROUPS * _ROWS_OF_WARPGROUP} rows do not fit in {shared_limit} bytes beside the weights"


@lru_cache(maxsize=256)
def middle_places(up: Architecture, down: Architecture, device_index: int) -> int:
    """Warpgroups in a round of the kernel for both factors around the activation; 0 where there is no kernel."""
    tile = wide_middle(up, down, shared_limit_of(device_index))
    return 0 if isinstance(tile, str) else _WARPGROUPS * multiprocessors_of(device_index)


def fills_rounds(rows: int, places: int) -> bool:
    """Whether nine of ten warpgroups have rows, over all rounds for this many rows. A round takes as long for few rows as for many.

    On an H200 two factors of width 768 took 131 us in one launch and 145 in two for 25344 rows, 97 and 97 for 16896, 190 and 150 for 26000.
    """
    units = -(-rows // _ROWS_OF_WARPGROUP)
    return rows > 0 and places > 0 and 10 * units >= 9 * -(-units // places) * places


@lru_cache(maxsize=256)
def _stretches(tile: MiddleTiling, device: torch.device) -> Tensor:  # shape: (classes, stages), int32
    """The column of u where each stretch of 64 inputs of a class begins."""
    first = tile.up.pieces[:: tile.up.tiles // tile.classes, 0, ::8]
    return torch.from_numpy(np.ascontiguousarray(first * 8).astype(np.int32)).to(device)


def multiply_middle(
    tile: MiddleTiling,
    u: Tensor,  # shape: (rows, in_features)
    second: Tensor,  # shape: (a, b, c, d)
    bias: Tensor | None,  # shape: (hidden,)
    third: Tensor,  # shape: (a, b, c, d)
    activation: str,
) -> Tensor:  # shape: (rows, out_features)
    """``activation(u @ K2.T + bias) @ K3.T`` on the current stream."""
    rows, device_index = u.shape[0], u.device.index
    units = -(-rows // _ROWS_OF_WARPGROUP)
    v = fresh((units * _ROWS_OF_WARPGROUP, tile.down.factor.out_features), u.dtype, u.device)[:rows]

    def make() -> tuple[Tensor, ...]:
        """Panels and biases in the order of use."""
        image, columns = pack_blocks(tile.up, second, bias, None, None, u.dtype, halved=True)
        downs = pack_blocks(tile.down, third, None, None, None, u.dtype)[0].view(tile.down.tiles, tile.classes, tile.pieces, -1)
        panels = [image.view(tile.up.tiles, -1), downs.transpose(0, 1).reshape(tile.up.tiles, -1)]
        return torch.cat(panels, dim=1).flatten(), columns[0].clone()

    stretches = _stretches(tile, u.device)
    rely_on([stretches])
    (image, biases), early = derived_for_launch(("ffn middle", tile, u.dtype, bias is None), (second, third, *present(bias)), make)
    kernel_of(tile, device_index, u.dtype, activation).launch(
        (min(units, multiprocessors_of(device_index)), 1, 1),
        (128 * (_WARPGROUPS + 1), 1, 1),
        tile.shared_bytes,
        current_stream(device_index),
        *(boxes(u, _ROWS_OF_WARPGROUP), image, biases, stretches, v, rows),
        early=early,
    )
    return v
