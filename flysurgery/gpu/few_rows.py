"""Linears on few rows, with a norm before and an epilogue behind them, in one launch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import product
from typing import ClassVar

import torch
from torch import Tensor

from flysurgery.errors import BackendError
from flysurgery.factors import factors_to_dense
from flysurgery.gpu.device import multiprocessors_of, shared_limit_of
from flysurgery.gpu.fused_linear import readable
from flysurgery.gpu.kernel import Kernel, Sizes, current_stream, float_bits, kernel_of
from flysurgery.gpu.modes import HALF_MODES, macros
from flysurgery.gpu.parts import Dense, Linear, Norm, present
from flysurgery.gpu.replay.recording import fresh
from flysurgery.gpu.weight_cache import derived_for_launch

_CHUNK = 32  # inputs of which a lane takes adjacent 16 bytes
_MOST_WARPS = 12
_CHUNKS_OF_WARP = (2, 4)
"""The least and the most chunks of a warp: fewer would give too many sums to add, more would not fit in registers."""
_ROW_TILES, _COLUMNS = (1, 2, 3), (32, 48, 64, 96, 128)
_REGISTERS_BESIDE, _REGISTERS_OF_NORM = 12, 16
_REGISTERS, _REGISTERS_OF_THREAD, _MOST_RESIDENT = 65536, 224, 2


@dataclass(frozen=True)
class FewRowsTiling:
    """Sizes of ``kernels/few_rows.cu``.

    Attributes:
        norm: whether rows of x are normalized first.
        row_tiles: of 16 rows, of a block.
        columns: outputs of a block.
        split: warps of a block, each with its share of the inputs.
    """

    kernel: ClassVar[str] = "few_rows"
    in_features: int
    out_features: int
    norm: bool
    row_tiles: int
    columns: int
    split: int

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block: the sums of each warp, and vectors of the columns and of the norm."""
        pitch = self.columns + (40 - self.columns % 32) % 32
        return 4 * (self.split * 16 * self.row_tiles * pitch + 2 * self.columns + 2 * self.in_features * self.norm)

    @property
    def registers(self) -> int:
        """Registers a thread, estimated: the operands and sums of a warp, and what stands beside them."""
        chunks, tiles = self.in_features // _CHUNK // self.split, self.columns // 8
        return tiles * chunks * 4 + self.row_tiles * (chunks * 8 + tiles * 4) + _REGISTERS_BESIDE + _REGISTERS_OF_NORM * self.norm

    @property
    def resident(self) -> int:
        """Blocks for which the registers of a multiprocessor suffice, up to ``_MOST_RESIDENT``."""
        rounded = -(-self.registers // 8) * 8
        return min(_REGISTERS // (32 * self.split * rounded), _MOST_RESIDENT) if rounded <= _REGISTERS_OF_THREAD else 0

    def grid(self, rows: int) -> tuple[int, int, int]:
        """The blocks for so many rows."""
        return (self.out_features // self.columns, -(-rows // (16 * self.row_tiles)), 1)

    def most_rows(self, multiprocessors: int) -> int:
        """Rows whose blocks all run at once."""
        return self.resident * multiprocessors // (self.out_features // self.columns) * 16 * self.row_tiles

    def defines(self, dtype: torch.dtype, activation: str, residual: bool) -> dict[str, int]:
        """The macros that the kernel is compiled with."""
        return macros(self, mode=dtype, activation=activation, residual=residual, resident=self.resident)


def few_rows_tilings(in_features: int, out_features: int, norm: bool, shared_limit: int) -> list[FewRowsTiling]:
    """The tilings that fit a layer, the smallest blocks first; none where its sizes are multiples of no tile."""
    chunks, rest = divmod(in_features, _CHUNK)
    least, most = _CHUNKS_OF_WARP
    splits = [split for split in range(_MOST_WARPS, 0, -1) if chunks % split == 0 and least <= chunks // split <= most and not rest]
    widths = [columns for columns in _COLUMNS if out_features % columns == 0]
    shapes = product(_ROW_TILES, widths, splits[:1])
    tiles = (FewRowsTiling(in_features, out_features, norm, *shape) for shape in shapes)
    fitting = (tile for tile in tiles if 0 < tile.resident * tile.shared_bytes <= shared_limit)
    return sorted(fitting, key=lambda tile: tile.row_tiles * tile.columns)


@lru_cache(maxsize=1024)
def most_rows(in_features: int, out_features: int, norm: bool, dtype: torch.dtype, device_index: int) -> int:
    """The most rows for which the kernel takes a layer: all their blocks run at once. 0 where it does not take the layer.

    For more rows, kernels that read each weight once for many rows are faster.
    """
    if dtype not in HALF_MODES:
        return 0
    tiles = few_rows_tilings(in_features, out_features, norm, shared_limit_of(device_index))
    return max((tile.most_rows(multiprocessors_of(device_index)) for tile in tiles), default=0)


@lru_cache(maxsize=1024)
def _launcher(
    in_features: int, out_features: int, norm: bool, rows: int, dtype: torch.dtype, activation: str, residual: bool, device_index: int
) -> tuple[Kernel, Sizes]:
    """The kernel for this many rows, and its launch: blocks, threads and shared memory; of the smallest blocks that all run at once.

    Raises:
        BackendError: there are none.
    """
    for tile in few_rows_tilings(in_features, out_features, norm, shared_limit_of(device_index)):
        if rows <= tile.most_rows(multiprocessors_of(device_index)):
            sizes = tile.grid(rows), (32 * tile.split, 1, 1), tile.shared_bytes
            return kernel_of(tile, device_index, dtype, activation, residual), sizes
    raise BackendError(f"the kernel for few rows takes no {rows} rows of {in_features} features to {out_features}")


def run_few_rows(
    x: Tensor,  # shape: (rows, in_features)
    norm: Norm | None,
    group: Sequence[Linear],
    activation: str,
    residual: Tensor | None,  # shape: (rows, sum of all out_features)
    scale: Tensor | None,  # shape: (sum of all out_features,)
) -> Tensor:  # shape: (rows, sum of all out_features)
    """``residual + activation(scale * group(norm(x)))``, the linears' outputs side by side, in one launch on the current stream.

    Factors are multiplied out in float64 when they are packed, and rounded once; the result takes the memory of a dense layer. For few
    rows the arithmetic that factors save takes no time. Parameters may be wider than x.

    Raises:
        BackendError: there are more than ``most_rows``, or the kernel does not compile or launch.
    """
    device_index = x.device.index
    (rows, in_features), outputs = x.shape, outputs_of(group)
    y = fresh((rows, outputs), x.dtype, x.device)
    if rows == 0:
        return y
    norm_weight, norm_bias, eps = norm or (None, None, 0.0)
    sources = present(*[part for member in group for part in member.tensors], norm_weight, norm_bias, scale)
    in_place = lies_in_place(group, x.dtype)

    def make() -> tuple[Tensor, ...]:
        vectors = pack_vectors(group, (norm_weight, norm_bias), scale, in_features)
        return vectors if in_place else (*vectors, pack_weights(group).to(x.dtype))

    token = ("few rows", x.dtype, in_place, *[member.form for member in group], norm_weight is None, norm_bias is None, scale is None)
    (vectors, columns, *packed), early = derived_for_launch(token, sources, make)
    x, residual = readable(x), None if residual is None else readable(residual)
    strides = [0 if part is None else part.stride(0) * part.element_size() for part in (x, residual)]
    kernel, launched = _launcher(in_features, outputs, norm is not None, rows, x.dtype, activation, residual is not None, device_index)
    kernel.launch(
        *launched,
        current_stream(device_index),
        *(x, packed[0] if packed else sources[0], vectors, columns, residual, y, rows, *strides, float_bits(eps)),
        early=early,
    )
    return y


def lies_in_place(group: Sequence[Linear], dtype: torch.dtype) -> bool:
    """Whether the kernel reads the weights where they lie: those of one dense linear."""
    linear = group[0]
    if len(group) > 1 or not isinstance(linear, Dense):
        return False
    return linear.weight.dtype == dtype and linear.weight.is_contiguous() and linear.weight.data_ptr() % 16 == 0


def outputs_of(group: Sequence[Linear]) -> int:
    """How many outputs all linears have."""
    return sum([member.sizes[1] for member in group])


def pack_weights(group: Sequence[Linear]) -> Tensor:  # shape: (sum of all out_features, in_features)
    """The matrices of all linears, one below the other, in float64."""
    return torch.cat(
        [
            member.weight.flatten(1).double() if isinstance(member, Dense) else factors_to_dense([each.double() for each in member.factors])
            for member in group
        ]
    )


def pack_vectors(
    group: Sequence[Linear], norm: tuple[Tensor | None, Tensor | None], scale: Tensor | None, inputs: int
) -> tuple[Tensor, Tensor]:  # shapes: (2, in_features), (2, out_features)
    """The norm's weight and bias; what sums are multiplied by and what is added then. All float32."""
    first = group[0].tensors[0]
    ones, zeros = partial(first.new_ones, dtype=torch.float32), partial(first.new_zeros, dtype=torch.float32)
    gain, offset = (default(inputs) if part is None else part.float() for part, default in zip(norm, (ones, zeros), strict=True))
    factor = ones(outputs_of(group)) if scale is None else scale.float()
    shift = torch.cat([zeros(member.sizes[1]) if member.bias is None else member.bias.float() for member in group])
    return torch.stack((gain, offset)), torch.stack((factor, shift * factor))
