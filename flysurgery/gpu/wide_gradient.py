"""Gradients of a wide feed-forward block, factor by factor: no product meets the zeros of a layer's dense weight (sm_90a, halves).

    x ─first─> u ─second─> hidden units, activation ─third─> v ─last─> y

The backward pass computes u and the hidden units again, sorted by blocks, so that the blocks of the second and third factor are batches of
dense products. The first and last factor are narrow. They are multiplied as dense matrices, whose zeros cost less than copies of x and dy.
``block_linear.cu`` multiplies by the blocks of a first factor where it takes them in this order.
"""

from dataclasses import dataclass
from functools import cache, lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from flysurgery.gpu.block_linear import BlockTiling, block_tiling, launch_blocks, no_summands
from flysurgery.gpu.device import shared_limit_of
from flysurgery.gpu.factor_by_factor import wide_tilings
from flysurgery.gpu.fused_linear import packed
from flysurgery.gpu.gather import Packer, by_places
from flysurgery.gpu.gradients import summed
from flysurgery.gpu.graph_branch import Branch
from flysurgery.gpu.hidden_gradient import HiddenTiles, panels, run_hidden_gradient
from flysurgery.gpu.modes import HALF_MODES
from flysurgery.gpu.operands import FusedFactors, present
from flysurgery.gpu.row_sums import sum_of_rows
from flysurgery.gpu.weight_cache import make_to_keep
from flysurgery.gpu.weight_image import entries_of
from flysurgery.patterns import Architecture, Pattern

_COLUMNS, _STAGE = (128, 96, 64), 64
_MOST = 0.75
"""The share of a dense block's products up to which fewer are faster: 0.62 took 0.80 of its time, 0.50 took 0.77 (ViT-B, both ways)."""

_NAMES = "first", "second", "third", "last"


class WideImages(NamedTuple):
    """A block's weights in halves, as its gradients need them; ``last`` is scaled."""

    panels: Tensor  # of the second and third factor, for ``run_hidden_gradient``
    second: Tensor  # shape: (classes, hidden / classes, inputs): the factor's blocks
    last: Tensor  # shape: (out_features, narrow)
    into: Tensor  # the first factor for x: shape (in_features, middle), or the image of the first of ``blocks``
    back: Tensor  # and for the gradient of u: shape (middle, in_features), or the image of the second of ``blocks``
    bias: Tensor | None  # shape: (hidden,), in the order of the tiles


class WideGradients(NamedTuple):
    """The gradients of x, and of the scaled weights in float32: None for a layer that does not learn.

    Those of weights may be read after ``Branch.join``.
    """

    x: Tensor  # shape: (rows, in_features)
    up: tuple[Tensor, Tensor] | None  # shapes: (a, b, c, d), the factors left to right
    bias: Tensor | None  # shape: (hidden,), of up
    down: tuple[Tensor, Tensor] | None


@dataclass(frozen=True, eq=False)
class WideGradient:
    """The orders and sizes of one pair of layers. It is equal only to itself.

    Attributes:
        factors: first, second, third and last.
        hidden, narrow: the feature at each place of the hidden units' gradients, and of v, as ``wide_tilings`` has it.
        tiles: of the hidden units.
        blocks: of the products of x with the first factor and of u's gradient with its transpose; None where they are dense.
    """

    factors: tuple[Pattern, Pattern, Pattern, Pattern]
    hidden: np.ndarray  # shape: (hidden,)
    narrow: np.ndarray  # shape: (narrow,)
    tiles: HiddenTiles
    blocks: tuple[BlockTiling, BlockTiling] | None

    def weights(self, up: FusedFactors, down: FusedFactors, scale: Tensor | None, dtype: torch.dtype) -> WideImages:
        """The block's weights in ``dtype``: one launch, and one more for a scale."""
        first, second, _, last = self.factors
        left = down.factors[0]
        left = left if scale is None else left * by_output(scale, left)
        bias = present(up.bias)
        made = _packer(self, dtype, up.factors[0].device, len(bias))((*up.factors, left, down.factors[1], *bias))
        blocks, matrix = _as((second.d, second.b, second.c), made[1]), _as(last.shape, made[2])
        if self.blocks is None:
            back = _as(first.shape, made[3])
            into = back.t()
        else:
            into, back = made[3:5]
        return WideImages(made[0], blocks, matrix, into, back, made[-1] if bias else None)

    def run(
        self,
        x: Tensor,  # shape: (rows, in_features)
        dy: Tensor,  # shape: (rows, out_features)
        v: Tensor,  # shape: (rows, narrow), in the order of ``narrow``
        images: WideImages,
        activation: str,
        learns: tuple[bool, bool],
        branch: Branch,
    ) -> WideGradients:
        """The gradients of ``last(third(activation(second(first(x)) + bias)))`` for gradients dy, on the current stream.

        ``learns``: whether gradients of the first two factors and the bias are needed, and those of the others. On the branch each is read
        from that of its factor's dense matrix, or of its blocks, beside the products that follow.
        """
        classes, parts = self.tiles.classes, self.tiles.parts
        into, back = self.blocks or (None, None)
        u = _times(x, images.into, into)
        of_last = branch.run(self._read, "last", summed(dy, v)) if learns[1] else None
        of_v = dy @ images.last
        hidden, of_hidden, sums = run_hidden_gradient(u, of_v, images.panels, images.bias, activation, self.tiles)
        up = bias = down = None
        if of_last is not None:
            down = of_last, branch.run(self._read, "third", summed(_batch(of_v, parts), _batch(hidden, parts)))
        of_u = torch.empty_like(u)
        torch.bmm(_batch(of_hidden, classes), images.second, out=_batch(of_u, classes))
        if learns[0]:
            bias = branch.run(self._read, "bias", sums)
            of_second = branch.run(self._read, "second", summed(_batch(of_hidden, classes), _batch(u, classes)))
            up = of_second, branch.run(self._read, "first", summed(of_u, x))
        return WideGradients(_times(of_u, images.back, back), up, bias, down)

    def _read(self, name: str, gradient: Tensor) -> Tensor:  # shape: (a, b, c, d), or (hidden,)
        """The gradient of a factor; or of the bias, from parts of its sum."""
        order = _inverse(self, name, gradient.device)
        if name == "bias":
            return sum_of_rows(gradient, torch.float32).index_select(0, order)
        return gradient.flatten().index_select(0, order).view(self.factors[_NAMES.index(name)].factor_shape)

    def entries(self, name: str) -> np.ndarray:
        """Where the entries of a factor's matrix, or of its blocks, stand in the flattened factor; -1 for zeros."""
        first, second, third, last = self.factors
        by_class, by_part = self.hidden.reshape(second.d, -1), self.narrow.reshape(third.a, -1)
        if name == "first":
            return entries_of(first, _middle(second)[:, None], np.arange(first.in_features))
        if name == "second":
            return entries_of(second, by_class[..., None], _middle(second).reshape(second.d, 1, -1))
        if name == "third":  # whose hidden units are in the order of h
            units = self.hidden.reshape(second.d, third.a, -1).swapaxes(0, 1).reshape(third.a, 1, -1)
            return entries_of(third, by_part[..., None], units)
        return entries_of(last, np.arange(last.out_features)[:, None], self.narrow)

    def orders(self) -> list[np.ndarray]:
        """Where each element of an image comes from in all sources, one after the other; -1 for zeros."""
        first, second, third, last = self.factors
        starts = {"second": 0, "first": second.nnz, "last": second.nnz + first.nnz, "third": second.nnz + first.nnz + last.nnz}

        def moved(places: np.ndarray, name: str) -> np.ndarray:
            return np.where(places >= 0, places + starts[name], -1)

        seconds, lasts, thirds = (moved(self.entries(name), name) for name in ("second", "last", "third"))
        # the third factor's blocks by hidden unit, in the order of the tiles
        gradients = thirds.swapaxes(1, 2).reshape(third.a, second.d, -1, third.b).swapaxes(0, 1).reshape(-1, third.b)
        sides = [panels(torch.from_numpy(side), self.tiles.columns) for side in (seconds.reshape(-1, second.c), gradients)]
        if self.blocks is None:
            firsts = [self.entries("first")]
        else:
            transposed = np.arange(first.nnz).reshape(first.factor_shape).swapaxes(1, 2).ravel()
            into, back = (tile.weight_indices for tile in self.blocks)
            firsts = [into, np.where(back >= 0, transposed[back], -1)]
        biases = self.hidden + starts["third"] + third.nnz
        found = [torch.cat(sides, dim=1).numpy(), seconds, lasts, *(moved(each, "first") for each in firsts), biases]
        return [order.ravel().astype(np.int32) for order in found]


def by_output(scale: Tensor, factor: Tensor) -> Tensor:  # shapes: (a * b * d,), (a, b, c, d); of the result: (a, b, 1, d)
    """A scale of outputs, to be multiplied with their factor."""
    a, b, _, d = factor.shape
    return scale.view(a, b, 1, d)


def _middle(second: Pattern) -> np.ndarray:  # shape: (middle,)
    """The feature at each place of u: sorted by classes."""
    return np.arange(second.in_features).reshape(-1, second.d).T.flatten()


def _as(shape: tuple[int, ...], image: Tensor) -> Tensor:
    """An image without what fills it up to the next one."""
    return image[: int(np.prod(shape))].view(shape)


def _times(x: Tensor, image: Tensor, tile: BlockTiling | None) -> Tensor:  # shapes: (rows, inputs), any, (rows, outputs)
    """The product of x and a matrix, or what a tiling reads of it."""
    return x @ image if tile is None else launch_blocks(tile, packed(x), image, no_summands(tile, x.device))


def _batch(rows: Tensor, parts: int) -> Tensor:  # shapes: (rows, features), (parts, rows, features / parts)
    """Parts of the features as a batch, a view."""
    return rows.view(len(rows), parts, -1).transpose(0, 1)


@lru_cache(maxsize=256)
def wide_gradient(up: Architecture, down: Architecture, shared_limit: int) -> WideGradient | str:
    """How a block's gradients are computed factor by factor, or why they are not; in the orders of ``wide_tilings``."""
    tilings = wide_tilings(up, down, shared_limit)
    if isinstance(tilings, str):
        return tilings
    first, second, third, last = (tile.factor for tile in tilings)
    share = third.c // second.d
    columns = next((columns for columns in _COLUMNS if share % columns == 0), 0)
    if second.a != 1 or third.d != 1 or third.c % second.d or not columns or second.c % _STAGE or third.b % _STAGE:
        return f"no hidden unit reads whole stages of {_STAGE} columns through {second} and {third}"
    middle = _middle(second)
    into = block_tiling(first, range(first.in_features), middle, 1, shared_limit)
    back = block_tiling(first.transpose, middle, range(first.in_features), first.d, shared_limit)
    blocks = None if isinstance(into, str) or isinstance(back, str) else (into, back)
    of_matrices = 3 * first.in_features * first.out_features + 2 * last.in_features * last.out_features
    dense = (3 * first.in_features + 2 * last.out_features) * second.out_features  # products for a row, of layers multiplied out
    if of_matrices + 3 * second.nnz + 2 * third.nnz > _MOST * dense:
        return f"{up} and {down} leave more than {_MOST:.0%} of the products of dense layers"
    hidden, narrow = (np.array(tile.outputs) for tile in tilings[1:3])
    tiles = HiddenTiles(columns, second.c, third.b, second.d, third.a, share // columns)
    return WideGradient((first, second, third, last), hidden, narrow, tiles, blocks)


def takes_wide_gradient(x: Tensor, up: FusedFactors, down: FusedFactors) -> bool:
    """Whether the gradients of a block that is multiplied factor by factor are computed so too."""
    found = wide_gradient(up.architecture, down.architecture, shared_limit_of(x.device.index))
    return len(x) > 0 and x.dtype in HALF_MODES and not isinstance(found, str) and found.tiles.slots(x.device.index) > 0


@cache  # a captured graph reads them
def _inverse(gradient: WideGradient, name: str, device: torch.device) -> Tensor:  # shape: (elements of the factor,), int32
    """The place of each element of a factor, or of the bias, among those of its gradient."""

    def make() -> tuple[Tensor, ...]:
        places = gradient.hidden if name == "bias" else gradient.entries(name).ravel()
        (held,) = np.nonzero(places >= 0)
        found = np.empty(len(held), np.int32)
        found[places[held]] = held
        return (torch.from_numpy(found).to(device),)

    return make_to_keep(make, device)[0]


@cache
def _packer(gradient: WideGradient, dtype: torch.dtype, device: torch.device, biases: int) -> Packer:
    """Gives the images of second, first, last and third factor and, if there is one, a bias."""
    for name in (*_NAMES, "bias"):
        _inverse(gradient, name, device)  # before a capture, which cannot make them
    orders = make_to_keep(lambda: tuple(torch.from_numpy(order).to(device) for order in gradient.orders()), device)
    return by_places(orders[: len(orders) - 1 + biases], dtype)
