"""A product with one factor and its epilogue in one launch; inputs and outputs lie in any given order (sm_90a, halves)."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from flysurgery.gpu.device import multiprocessors_of
from flysurgery.gpu.fused_linear import strides_of
from flysurgery.gpu.gather import Packer, by_places
from flysurgery.gpu.kernel import current_stream, float_bits, kernel_of
from flysurgery.gpu.layer_norm import row_moments
from flysurgery.gpu.modes import macros
from flysurgery.gpu.operands import Norm, present, sent_through
from flysurgery.gpu.recording import fresh, rely_on
from flysurgery.gpu.tensor_map import boxes
from flysurgery.gpu.tiling import run_of
from flysurgery.gpu.weight_cache import derived_for_launch
from flysurgery.gpu.weight_image import entries_of, output_order
from flysurgery.patterns import Pattern

_PIECE, _STAGE, _UNIT = 8, 64, 64
_SLOT_BYTES = _UNIT * 2 * _STAGE
_WIDTHS = (256, 192, 144, 128, 96, 72, 64, 48, 40, 32, 24, 16)
_FEWEST_SLOTS, _MAX_SLOTS = 3, 6
_MAX_REGISTERS = 255
_LEAST_AHEAD = 512
"""Columns that the rows of all slots are multiplied by. The copy engine was slower for x with 288 and fewer, faster with 512 and more."""


@dataclass(frozen=True, eq=False)
class BlockTiling:
    """Sizes of ``kernels/block_linear.cu``. A tiling is equal only to itself: its orders are too long to be compared at each call.

    Attributes:
        factor: the pattern that is multiplied by.
        inputs, outputs: the feature that stands at each place of x and y.
        classes: residues whose outputs alternate in y; 1 where those of a tile follow each other.
        columns: outputs of a class in a tile.
        warpgroups: of a block, 64 rows each.
        slots: stages of x, of 64 columns each, that a warpgroup has in shared memory.
    """

    kernel: ClassVar[str] = "block_linear"
    factor: Pattern
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    classes: int
    columns: int
    warpgroups: int = 0
    slots: int = 0

    @property
    def tiles(self) -> int:
        return len(self.outputs) // (self.classes * self.columns)

    @property
    def run(self) -> int:
        """Tiles of 8 columns of which a lane's columns are adjacent: with those of the other classes whole vectors of 16 bytes."""
        return run_of(self.classes, 2)

    @cached_property
    def pieces(self) -> np.ndarray:  # shape: (tiles, classes, pieces), places of x in eights; -1 for none
        """The pieces of 8 columns that each class of each tile reads, the same number for all."""
        block = blocks_of(self.inputs, self.factor.c, self.factor.d).reshape(-1, _PIECE)
        found = [np.flatnonzero((block == each).any(axis=1)) for each in self._blocks.flat]
        padded = np.full((len(found), -(-max(map(len, found)) // 8) * 8), -1)
        for row, places in zip(padded, found, strict=True):
            row[: len(places)] = places
        return padded.reshape(self.tiles, self.classes, -1)

    @cached_property
    def _blocks(self) -> np.ndarray:  # shape: (tiles, classes)
        """The dense block of the factor, i * d + j, that makes each class of each tile."""
        blocks = blocks_of(self.outputs, self.factor.b, self.factor.d)
        return blocks.reshape(self.tiles, self.columns, self.classes)[:, 0]

    @property
    def steps(self) -> int:
        """Stages of 64 columns of x that a class reads."""
        return self.pieces.shape[2] // 8

    @property
    def last(self) -> int:
        """Steps of 16 columns of x that the last stage of a class has, where it has most."""
        return -(-int((self.pieces[..., -8:] >= 0).sum(axis=-1).max()) // 2)

    @cached_property
    def boxes(self) -> bool:
        """Whether the copy engine loads x: where a stage's columns lie side by side, and products with all slots take long enough."""
        stages = self.pieces.reshape(-1, 8)
        beside = bool((np.diff(stages) == 1).all() and (stages >= 0).all())
        return beside and self.classes == 1 and self.slots * self.columns >= _LEAST_AHEAD

    @cached_property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block."""
        stages = self.classes * self.steps
        held = 2 * self.run * self.classes
        turned = 4 * self.warpgroups * 64 * held if held > 8 else 0
        rest = self.columns * self.classes * 12 + stages * (32 + 8) + turned + self.warpgroups * self.slots * 16
        return stages * _STAGE * self.columns * 2 + self.warpgroups * self.slots * _SLOT_BYTES + rest

    @property
    def registers(self) -> int:
        """Registers of a thread, estimated: sums, and others such as vectors that are turned."""
        held = 2 * self.run * self.classes
        return self.classes * self.columns // 2 + 50 + 4 * self.classes + (held if held > _PIECE else 0)

    def defines(self, dtype: torch.dtype, activation: str, norm: int, residual: int, scaled: int) -> dict[str, int]:
        """The macros that the kernel is compiled with; ``norm`` is the number of parts that a row's moments come in, 0 without a norm."""
        names = "tiles", "steps", "last", "columns", "run", "warpgroups", "slots", "boxes"
        sizes = {name: getattr(self, name) for name in names}
        epilogue = {"activation": activation, "residual": residual, "scaled": scaled}
        return macros(mode=dtype, d=self.classes, features=len(self.inputs), norm=norm, **sizes, **epilogue)

    @property
    def place(self) -> np.ndarray:  # shape: (columns,)
        """The output of a tile and class that each of its columns makes, so that a lane holds whole vectors of a row of y."""
        return output_order(self.columns, self.run, 2 * self.run)

    @cached_property
    def weight_indices(self) -> np.ndarray:  # shape: (tiles, classes, steps, 8, columns, 8)
        """Where each element of the image comes from in the flattened factor; -1 for zeros."""
        outputs = np.array(self.outputs).reshape(self.tiles, self.columns, self.classes)[:, self.place].transpose(0, 2, 1)
        k = self.pieces[..., None] * _PIECE + np.arange(_PIECE)
        inputs = np.where(self.pieces[..., None] >= 0, np.array(self.inputs)[k], -1)  # shape: (tiles, classes, pieces, 8)
        places = entries_of(self.factor, outputs[:, :, None, :, None], inputs[:, :, :, None, :])
        return places.reshape(self.tiles, self.classes, self.steps, 8, self.columns, 8)


def blocks_of(features: Sequence[int] | np.ndarray, size: int, stride: int) -> np.ndarray:
    """The dense block, i * d + j, that inputs (size c) or outputs (size b) of a factor of stride d belong to."""
    features = np.asarray(features)
    return features // (size * stride) * stride + features % stride


def outputs_for(factor: Pattern, readers: np.ndarray) -> np.ndarray:  # shapes: (out_features,) each
    """A factor's outputs in the order of its dense blocks, within each of what reads them."""
    outputs = np.arange(factor.out_features)
    return outputs[np.lexsort((outputs, readers, blocks_of(outputs, factor.b, factor.d)))]


def block_tiling(
    factor: Pattern, inputs: Sequence[int] | np.ndarray, outputs: Sequence[int] | np.ndarray, classes: int, shared_limit: int
) -> BlockTiling | str:
    """The tiling of a product, or why there is none: the widest tile beside which three warpgroups keep three stages each.

    Two warpgroups where their tile is twice as wide, so that x is read half as often; one where there is no room for more.
    Outputs of a dense block must stand side by side, or alternate with those of the other ``classes``.
    """
    places, results = tuple(map(int, inputs)), tuple(map(int, outputs))
    if len(places) % _PIECE:
        return f"rows of {len(places)} features are no whole vectors of 16 bytes"
    three, two, one = (_widest(BlockTiling(factor, places, results, classes, 0, count), shared_limit) for count in (3, 2, 1))
    chosen = two if two and three and two.columns >= 2 * three.columns else three or two or one
    return chosen or f"no tile of {factor} fits in {shared_limit} bytes of shared memory"


def _widest(tile: BlockTiling, shared_limit: int) -> BlockTiling | None:
    """The widest tile for this many warpgroups, with as many slots as fit."""
    blocks = blocks_of(tile.outputs, tile.factor.b, tile.factor.d)
    for columns in _WIDTHS:
        tile = replace(tile, columns=columns)
        if tile.factor.b % columns or np.ptp(blocks.reshape(-1, columns, tile.classes), axis=1).any():
            continue  # a class of a tile has the outputs of one dense block
        if columns % (8 * tile.run) or tile.registers > min(65536 // (128 * tile.warpgroups), _MAX_REGISTERS):
            continue
        for slots in range(_MAX_SLOTS, _FEWEST_SLOTS - 1, -1):
            if replace(tile, slots=slots).shared_bytes <= shared_limit:
                return replace(tile, slots=slots)
    return None


def pack_blocks(
    tile: BlockTiling,
    factor: Tensor,  # shape: (a, b, c, d)
    bias: Tensor | None,  # shape: (out_features,)
    scale: Tensor | None,  # shape: (out_features,)
    norm: Norm | None,
    dtype: torch.dtype,
    *,
    halved: bool = False,
) -> tuple[Tensor, Tensor]:  # shapes: (weights,), (1 or 3, outputs) float32
    """The weights as the kernel reads them; and the summands of its sums, with a scale or a norm also their factors and sums of weights.

    The norm's weight and bias are multiplied into the weights and summands, in float64. Without a norm it takes few launches, which a
    CUDA graph can replay. ``halved``: weights and summands are half as large.
    """
    shift, sums = bias, None
    if norm is not None:
        factor, sent = norm.folded_into(factor.double())
        shift = sent if bias is None else bias.double() if sent is None else bias.double() + sent
        sums = sent_through(factor.new_ones(tile.factor.in_features), (factor * (0.5 if halved else 1.0)).to(dtype).double())
    (image,) = _packer(tile, dtype, factor.device, halved)((factor,))
    image, zeros, order = image[: tile.weight_indices.size], no_summands(tile, factor.device), _order(tile, factor.device)
    summands = zeros if shift is None else shift.float()[order][None]
    summands = summands * 0.5 if halved else summands
    if scale is None and sums is None:
        return image, summands
    scales = torch.ones_like(zeros) if scale is None else scale.float()[order][None]
    return image, torch.cat([summands, scales, zeros if sums is None else sums.float()[order][None]])


@lru_cache(maxsize=1024)
def _packer(tile: BlockTiling, dtype: torch.dtype, device: torch.device, halved: bool) -> Packer:
    """Gives the image of a factor that is only moved, halved and rounded."""
    return by_places([torch.from_numpy(tile.weight_indices.ravel()).to(device)], dtype, halved=halved)


@lru_cache(maxsize=1024)
def _order(tile: BlockTiling, device: torch.device) -> Tensor:  # shape: (outputs,), int64
    return torch.tensor(tile.outputs, device=device)


@lru_cache(maxsize=1024)
def no_summands(tile: BlockTiling, device: torch.device) -> Tensor:  # shape: (1, outputs), float32
    """The second result of ``pack_blocks`` where there is neither bias nor scale nor norm."""
    return torch.zeros((1, len(tile.outputs)), device=device)


@lru_cache(maxsize=1024)
def _pieces(tile: BlockTiling, device: torch.device) -> Tensor:  # shape: (tiles, classes, pieces), int32
    """The bytes at which the pieces of x begin; -1 for none."""
    return torch.from_numpy(np.where(tile.pieces >= 0, tile.pieces * 2 * _PIECE, -1).astype(np.int32)).to(device)


def multiply_blocks(
    tile: BlockTiling,
    x: Tensor,  # shape: (rows, places)
    factors: Sequence[Tensor],  # which side by side along ``dim`` are the factor, shape (a, b, c, d)
    biases: Sequence[Tensor] = (),  # which one after the other are the bias, shape (out_features,)
    scale: Tensor | None = None,  # shape: (out_features,)
    residual: Tensor | None = None,  # shape: (rows, outputs)
    *,
    activation: str = "none",
    norm: Norm | None = None,
    moments: Tensor | None = None,  # shape: (rows, parts, 2), float32
    dim: int = 0,
    backwards: bool = False,
) -> Tensor:  # shape: (rows, outputs)
    """``residual + activation(scale * (norm(x) @ K.T + bias))`` on the current stream; rows begin at multiples of 16 bytes.

    ``moments`` are those of ``row_moments``, for each part of equal size of a row. A norm without them needs one more launch, which
    computes them. ``backwards``: from the last rows to the first.

    Cost of a call of R rows: ``2 * R * places of the factor that are no zeros`` operations; x is read from device memory once.
    """
    if len(x) == 0:
        return fresh((0, len(tile.outputs)), x.dtype, x.device)
    affine = () if norm is None else norm.tensors

    def make() -> tuple[Tensor, ...]:
        factor = factors[0] if len(factors) == 1 else torch.cat(list(factors), dim)
        bias = None if not biases else biases[0] if len(biases) == 1 else torch.cat(list(biases))
        return pack_blocks(tile, factor, bias, scale, norm, x.dtype, halved=activation != "none")

    token = "block linear", tile, x.dtype, activation, len(biases), scale is None, None if norm is None else norm.form
    (image, columns), early = derived_for_launch(token, (*factors, *biases, *present(scale), *affine), make)
    if norm is not None and moments is None:
        moments = row_moments(x)
    epilogue = {"activation": activation, "scaled": scale is not None, "eps": 0.0 if norm is None else norm.eps}
    return launch_blocks(tile, x, image, columns, residual, moments if norm else None, **epilogue, backwards=backwards, early=early)


def launch_blocks(
    tile: BlockTiling,
    x: Tensor,  # shape: (rows, places)
    image: Tensor,
    columns: Tensor,  # shape: (1 or 3, outputs)
    residual: Tensor | None = None,  # shape: (rows, outputs)
    moments: Tensor | None = None,  # shape: (rows, parts, 2), float32; those of the norm of x
    *,
    activation: str = "none",
    scaled: bool = False,
    eps: float = 0.0,
    backwards: bool = False,
    early: bool = False,
) -> Tensor:  # shape: (rows, outputs)
    """``multiply_blocks`` with what ``pack_blocks`` gives; rows begin at multiples of 16 bytes."""
    rows, device_index = x.shape[0], x.device.index
    y = fresh((rows, len(tile.outputs)), x.dtype, x.device)
    parts, pieces, strides = 0 if moments is None else moments.shape[1], _pieces(tile, x.device), strides_of(x, residual)
    rely_on([pieces])
    if tile.boxes and rows > 1 and x.stride(0) < x.shape[1]:
        x = x.contiguous()  # the copy engine takes no rows that overlap
    kernel_of(tile, device_index, x.dtype, activation, parts, residual is not None, scaled).launch(
        (max(1, min(-(-rows // 64), multiprocessors_of(device_index) // tile.tiles)) * tile.tiles, 1, 1),
        (128 * tile.warpgroups, 1, 1),
        tile.shared_bytes,
        current_stream(device_index),
        *(boxes(x, _UNIT) if tile.boxes else x, image, pieces, columns, moments, residual, y),
        *(rows, *strides, int(backwards), float_bits(eps)),
        early=early,
    )
    return y
