"""The two factors around the activation of a wide feed-forward block in one launch (sm_90a, halves)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from flysurgery.gpu.block_linear import BlockTiling, pack_blocks
from flysurgery.gpu.device import multiprocessors_of
from flysurgery.gpu.kernel import current_stream, load_kernel
from flysurgery.gpu.modes import macros
from flysurgery.gpu.replay.recording import fresh, rely_on
from flysurgery.gpu.tensor_map import boxes
from flysurgery.gpu.weight_cache import derived_for_launch
from flysurgery.patterns import Pattern

WARPGROUPS, ROWS_OF_WARPGROUP = 3, 64
_COLUMNS, _STAGE = 128, 64
_PANEL_BYTES = _STAGE * _COLUMNS * 2
_MAX_SLOTS, _FEWEST_SLOTS = 6, 4


@dataclass(frozen=True)
class MiddleTiling:
    """Sizes of ``kernels/ffn_middle.cu``.

    Attributes:
        up, down: the factors' products, in tiles of 128 outputs: pieces of hidden units in the order of use, blocks of the result.
        classes: of the factor ``up``; one after the other is in shared memory.
        slots: panels of weights in shared memory.
    """

    up: BlockTiling
    down: BlockTiling
    classes: int
    slots: int

    @property
    def stages(self) -> int:
        """Stretches of 64 inputs of a class."""
        return self.up.steps

    @property
    def pieces(self) -> int:
        """Pieces of hidden units of a class that a block of the result reads."""
        return self.up.tiles // (self.classes * self.down.tiles)

    @cached_property
    def places(self) -> np.ndarray:  # shape: (classes, stages)
        """The column of u where each stretch of a class begins."""
        first = self.up.pieces[:: self.up.tiles // self.classes, 0, ::8]
        return np.ascontiguousarray(first * 8).astype(np.int32)

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block."""
        stretches = WARPGROUPS * self.stages
        return stretches * (_STAGE * ROWS_OF_WARPGROUP * 2 + 16) + self.slots * (_PANEL_BYTES + 16)

    def defines(self, dtype: torch.dtype, activation: str) -> dict[str, int]:
        """The macros that the kernel is compiled with."""
        sizes = {"classes": self.classes, "stages": self.stages, "a3": self.down.tiles, "pieces": self.pieces, "slots": self.slots}
        return macros(mode=dtype, activation=activation, **sizes)


def middle_tiling(
    second: Pattern, third: Pattern, middle: Sequence[int] | np.ndarray, narrow: Sequence[int] | np.ndarray, shared_limit: int
) -> MiddleTiling | str:
    """The tiling of two factors whose inputs and outputs lie in any given order, or why there is none."""
    share = third.c // second.d
    if second.a != 1 or third.d != 1 or third.b != _COLUMNS or third.c % second.d or share % _COLUMNS or second.c % _STAGE:
        return f"no kernel multiplies by {second} and {third} in one launch: it takes whole stages of {_STAGE} inputs, blocks of {_COLUMNS}"
    units = np.arange(third.in_features).reshape(third.a, share // _COLUMNS, _COLUMNS, second.d)
    hidden = units.transpose(3, 0, 1, 2).reshape(-1, _COLUMNS)  # a class, a block, a piece
    up = BlockTiling(second, tuple(map(int, middle)), tuple(map(int, hidden.ravel())), 1, _COLUMNS)
    seen = hidden[:, up.place]
    down = BlockTiling(third, tuple(map(int, seen.ravel())), tuple(map(int, narrow)), 1, _COLUMNS)
    first = up.pieces.reshape(up.tiles, -1, 8)
    if up.steps * _STAGE != second.c or (np.diff(first) != 1).any() or (first[..., 0] % 8).any() or (first < 0).any():
        return f"the inputs of {second} do not lie in stretches of {_STAGE}"
    for slots in range(_MAX_SLOTS, _FEWEST_SLOTS - 1, -1):
        tile = MiddleTiling(up, down, second.d, slots)
        if tile.shared_bytes <= shared_limit:
            return tile
    return f"{second.c} columns of {WARPGROUPS * ROWS_OF_WARPGROUP} rows do not fit in {shared_limit} bytes beside the weights"


def pack_middle(
    tile: MiddleTiling, second: Tensor, bias: Tensor | None, third: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:  # shapes: (a, b, c, d), (hidden,), (a, b, c, d) -> (bytes,) uint8, (hidden,) float32
    """Panels and biases in the order of use."""
    image, columns = pack_blocks(tile.up, second, bias, None, None, dtype, 0.5)
    pieces = tile.down.tiles, tile.classes, tile.pieces
    downs = pack_blocks(tile.down, third, None, None, None, dtype)[0].view(*pieces, -1).transpose(0, 1).reshape(tile.up.tiles, -1)
    return torch.cat([image.view(tile.up.tiles, -1), downs], dim=1).flatten(), columns[0].clone()


def fills_rounds(rows: int, places: int) -> bool:
    """Whether nine of ten warpgroups have rows, over all rounds for this many rows. A round takes as long for few rows as for many.

    On an H200 two factors of width 768 took 131 us in one launch and 145 in two for 25344 rows, 97 and 97 for 16896, 190 and 150 for 26000.
    """
    units = -(-rows // ROWS_OF_WARPGROUP)
    return rows > 0 and places > 0 and 10 * units >= 9 * -(-units // places) * places


class FfnMiddle:
    """The compiled kernel of one tiling on one device."""

    def __init__(self, tile: MiddleTiling, dtype: torch.dtype, activation: str, device_index: int) -> None:
        self.tile, self.dtype, self.device_index = tile, dtype, device_index
        self._multiprocessors = multiprocessors_of(device_index)
        self._places = torch.from_numpy(tile.places).to(torch.device("cuda", device_index))
        self._kernel = load_kernel("ffn_middle", tile.defines(dtype, activation), device_index)

    def multiply(
        self,
        u: Tensor,  # shape: (rows, in_features)
        second: Tensor,  # shape: (a, b, c, d)
        bias: Tensor | None,  # shape: (hidden,)
        third: Tensor,  # shape: (a, b, c, d)
    ) -> Tensor:  # shape: (rows, out_features)
        """``activation(u @ K2.T + bias) @ K3.T`` on the current stream."""
        tile, rows = self.tile, u.shape[0]
        units = -(-rows // ROWS_OF_WARPGROUP)
        v = fresh((units * ROWS_OF_WARPGROUP, tile.down.factor.out_features), u.dtype, u.device)[:rows]
        if rows == 0:
            return v
        sources = (second, third) if bias is None else (second, third, bias)
        rely_on([self._places])
        token = ("ffn middle", self, bias is None)
        (image, biases), early = derived_for_launch(token, sources, lambda: pack_middle(tile, second, bias, third, self.dtype))
        self._kernel.launch(
            (min(units, self._multiprocessors), 1, 1),
            (128 * (WARPGROUPS + 1), 1, 1),
            tile.shared_bytes,
            current_stream(self.device_index),
            *(boxes(u, ROWS_OF_WARPGROUP), image, biases, self._places, v, rows),
            early=early,
        )
        return v
