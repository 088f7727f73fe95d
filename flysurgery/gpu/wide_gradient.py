"""Gradients of a wide feed-forward block, factor by factor: no product meets the zeros of a layer's dense weight (sm_90a, halves).

    x ─first─> u ─second─> hidden units, activation ─third─> v ─last─> y

The blocks of the second and third factor are batches of dense products, for which u and the hidden units are sorted by blocks. They are
computed again. The first and last factor are narrow, and their gradients are those of dense matrices: the zeros in these cost less than
copies of x and dy. So are the products with them, except those with a first factor whose blocks a kernel takes in this order.
"""

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from flysurgery.gpu.block_linear import BlockTiling, block_tiling, launch_blocks, no_summands
from flysurgery.gpu.branch import Branch
from flysurgery.gpu.device import shared_limit_of
from flysurgery.gpu.factor_by_factor import wide_tilings
from flysurgery.gpu.gather import Packer
from flysurgery.gpu.gradients import summed
from flysurgery.gpu.hidden_gradient import HiddenTiles, panels, run_hidden_gradient
from flysurgery.gpu.image import places_of
from flysurgery.gpu.modes import HALF_MODES
from flysurgery.gpu.parts import FusedFactors, present
from flysurgery.gpu.row_sums import sum_of_rows
from flysurgery.gpu.weight_cache import make_to_keep
from flysurgery.patterns import Architecture, Pattern

_COLUMNS, _STAGE = (128, 96, 64), 64
_FEWEST_SLOTS = 3
_MOST = 0.75
"""The share of a dense block's products up to which fewer are faster: 0.62 took 0.80 of its time, 0.50 took 0.78 (ViT-B, both ways)."""

_NAMES = "first", "second", "third", "last"
_Places = dict[str, np.ndarray]


class WideImages(NamedTuple):
    """A block's weights in halves, as its gradients need them."""

    panels: Tensor  # of the second and third factor, for ``run_hidden_gradient``
    second: Tensor  # shape: (classes, hidden / classes, inputs): the factor's blocks
    last: Tensor  # shape: (out_features, narrow), scaled
    first: tuple[
        Tensor, Tensor
    ]  # for x and for u, images of ``blocks``; without these of shapes (in_features, middle), (middle, in_features)
    bias: Tensor | None  # shape: (hidden,), in the order of the tiles


class WideGradients(NamedTuple):
    """The gradients of x, and of the scaled weights in float32; those of weights may be read after ``Branch.join``."""

    x: Tensor  # shape: (rows, in_features)
    up: tuple[Tensor, Tensor]  # shapes: (a, b, c, d), the factors left to right
    down: tuple[Tensor, Tensor]
    bias: Tensor  # shape: (hidden,), of up


@dataclass(frozen=True, eq=False)
class WideGradient:
    """The orders and sizes of one pair of layers.

    Attributes:
        factors: first, second, third and last.
        middle, hidden, narrow: the feature at each place of u, of the hidden units' gradients, and of v, as ``wide_tilings`` has it.
        tiles: of the hidden units.
        blocks: of the products of x with the first factor and of u with its transpose; None where they are dense.
    """

    factors: tuple[Pattern, Pattern, Pattern, Pattern]
    middle: np.ndarray  # shape: (middle,)
    hidden: np.ndarray  # shape: (hidden,)
    narrow: np.ndarray  # shape: (narrow,)
    tiles: HiddenTiles
    blocks: tuple[BlockTiling, BlockTiling] | None

    @cached_property
    def places(self) -> _Places:
        """Where each element of a dense matrix, or of a batch of them, comes from in its flattened factor; -1 for zeros."""
        first, second, third, last = self.factors
        inputs, outputs = self.middle.reshape(second.d, -1), self.narrow.reshape(third.a, -1)
        units = self.hidden.reshape(second.d, third.a, -1).swapaxes(0, 1).reshape(third.a, -1)  # in the order of h
        return {
            "second": np.stack([_dense(second, *each) for each in zip(self.hidden.reshape(second.d, -1), inputs, strict=True)]),
            "first": _dense(first, self.middle, np.arange(first.in_features)),
            "last": _dense(last, np.arange(last.out_features), self.narrow),
            "third": np.stack([_dense(third, *each) for each in zip(outputs, units, strict=True)]),
        }

    def weights(self, up: FusedFactors, down: FusedFactors, scale: Tensor | None, dtype: torch.dtype) -> WideImages:
        """The block's weights in ``dtype``: one launch, and one more for a scale."""
        last = down.factors[0]
        last = last if scale is None else last * _by_output(scale, last)
        bias = present(up.bias)
        made = _packer(self, dtype, up.factors[0].device, len(bias))((*up.factors, last, down.factors[1], *bias))
        second, last = (_as(self.places[name], image) for name, image in (("second", made[1]), ("last", made[2])))
        if self.blocks is None:
            first = _as(self.places["first"], made[3])
            sides = first.t(), first
        else:
            sides = made[3], made[4]
        return WideImages(made[0], second, last, sides, made[-1] if bias else None)

    @cached_property
    def order(self) -> list[np.ndarray]:
        """Where each element of an image comes from in all sources, one after the other; -1 for zeros."""
        first, second, third, last = (pattern.nnz for pattern in self.factors)
        starts = {"second": 0, "first": second, "last": second + first, "third": second + first + last}
        moved = {name: np.where(places >= 0, places + starts[name], -1) for name, places in self.places.items()}
        columns, inputs = self.tiles.columns, moved["second"].reshape(-1, self.tiles.inputs)
        # the third factor's blocks by hidden unit, in the order of the tiles
        gradients = moved["third"].swapaxes(1, 2).reshape(self.factors[2].a, self.factors[1].d, -1, self.tiles.gradients)
        sides = [panels(torch.from_numpy(side), columns) for side in (inputs, gradients.swapaxes(0, 1).reshape(len(inputs), -1))]
        image = torch.cat(sides, dim=1).flatten().numpy()
        return [
            image,
            moved["second"].ravel(),
            moved["last"].ravel(),
            *self._orders_of_first(starts["first"]),
            self.hidden + starts["third"] + third,
        ]

    def _orders_of_first(self, start: int) -> list[np.ndarray]:
        """The same for the first factor alone, which begins at ``start``."""
        if self.blocks is None:
            found = [self.places["first"].ravel()]
        else:
            a, b, c, d = self.factors[0].factor_shape
            transposed = np.arange(a * b * c * d).reshape(a, b, c, d).swapaxes(1, 2).ravel()
            into, back = (tile.weight_indices.ravel() for tile in self.blocks)
            found = [into, np.where(back >= 0, transposed[back], -1)]
        return [np.where(places >= 0, places + start, -1) for places in found]

    def run(
        self,
        x: Tensor,  # shape: (rows, in_features)
        dy: Tensor,  # shape: (rows, out_features)
        v: Tensor,  # shape: (rows, narrow), in the order of ``narrow``
        images: WideImages,
        activation: str,
        branch: Branch,
    ) -> WideGradients:
        """The gradients of ``last(third(activation(second(first(x)) + bias)))`` for gradients dy, on the current stream.

        On the branch each factor's is read from that of its dense matrix, or of its blocks, beside the products that follow.
        """
        classes, parts = self.factors[1].d, self.factors[2].a
        into, back = self.blocks or (None, None)
        u = _times(x, images.first[0], into)
        of_last = branch.run(self._read, "last", summed(dy, v))
        of_v = dy @ images.last
        hidden, of_hidden, sums = run_hidden_gradient(u, of_v, images.panels, images.bias, activation, self.tiles)
        bias = branch.run(self._read, "bias", sums)
        of_third = branch.run(self._read, "third", _summed(_batch(of_v, parts), _batch(hidden, parts)))
        of_second = branch.run(self._read, "second", _summed(_batch(of_hidden, classes), _batch(u, classes)))
        of_u = torch.empty_like(u)
        torch.bmm(_batch(of_hidden, classes), images.second, out=_batch(of_u, classes))
        of_first = branch.run(self._read, "first", summed(of_u, x))
        return WideGradients(_times(of_u, images.first[1], back), (of_second, of_first), (of_last, of_third), bias)

    def _read(self, name: str, gradient: Tensor) -> Tensor:  # shape: (a, b, c, d), or (hidden,)
        """The gradient of a factor; or of the bias, from parts of its sum."""
        order = _inverse(self, name, gradient.device)
        if name == "bias":
            return sum_of_rows(gradient, torch.float32)[order]
        return gradient.flatten()[order].view(self.factors[_NAMES.index(name)].factor_shape)


def _as(places: np.ndarray, image: Tensor) -> Tensor:  # of the shape of places
    """An image without what fills it up to the next one."""
    return image[: places.size].view(places.shape)


def _times(x: Tensor, image: Tensor, tile: BlockTiling | None) -> Tensor:  # shapes: (rows, inputs), any, (rows, outputs)
    """The product of x and a matrix, or what a tiling reads of it."""
    return x @ image if tile is None else launch_blocks(tile, x, image, no_summands(tile, x.device))


def _batch(rows: Tensor, parts: int) -> Tensor:  # shapes: (rows, features), (parts, rows, features / parts)
    """Parts of the features as a batch, a view."""
    return rows.view(len(rows), parts, -1).transpose(0, 1)


def _summed(dy: Tensor, x: Tensor) -> Tensor:  # shapes: (batch, rows, outputs), (batch, rows, inputs), (batch, outputs, inputs)
    """``summed`` of a batch."""
    return torch.bmm(dy.transpose(1, 2), x, out_dtype=torch.float32)


def _by_output(scale: Tensor, factor: Tensor) -> Tensor:  # shapes: (a * b * d,), (a, b, c, d); of the result: (a, b, 1, d)
    a, b, _, d = factor.shape
    return scale.view(a, b, 1, d)


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
    narrow_ones = 3 * first.in_features * first.out_features + 2 * last.in_features * last.out_features
    dense = (3 * first.in_features + 2 * last.out_features) * second.out_features  # products for a row, of layers multiplied out
    if narrow_ones + 3 * second.nnz + 2 * third.nnz > _MOST * dense:
        return f"{up} and {down} leave more than {_MOST:.0%} of the products of dense layers"
    hidden, narrow = (np.array(tile.outputs) for tile in tilings[1:3])
    middle = np.arange(first.out_features).reshape(-1, second.d).T.flatten()
    places = [
        (j * second.c, i * third.b, i * third.c + j * share + piece)
        for j in range(second.d)
        for i in range(third.a)
        for piece in range(0, share, columns)
    ]
    tiles = HiddenTiles(columns, second.c, third.b, tuple(places))
    into = block_tiling(first, range(first.in_features), middle, 1, shared_limit)
    back = block_tiling(first.transpose, middle, range(first.in_features), first.d, shared_limit)
    blocks = None if isinstance(into, str) or isinstance(back, str) else (into, back)
    return WideGradient((first, second, third, last), middle, hidden, narrow, tiles, blocks)


def takes_wide_gradient(up: FusedFactors, down: FusedFactors, dtype: torch.dtype, device_index: int) -> bool:
    """Whether the gradients of a block that is multiplied factor by factor are computed so too."""
    found = wide_gradient(up.architecture, down.architecture, shared_limit_of(device_index))
    return dtype in HALF_MODES and not isinstance(found, str) and found.tiles.slots(device_index) >= _FEWEST_SLOTS


def _dense(pattern: Pattern, outputs: np.ndarray, inputs: np.ndarray) -> np.ndarray:  # shape: (outputs, inputs)
    """Where each entry of these rows and columns of a factor's matrix comes from in the flattened factor; -1 for zeros."""
    _, b, c, d = pattern.factor_shape
    m, q = outputs[:, None], inputs[None]
    i, j = m // (b * d), m % d
    inside = (q // (c * d) == i) & (q % d == j)
    return places_of(pattern, i, m // d % b, np.where(inside, q // d % c, -1), j)


@lru_cache(maxsize=256)
def _inverse(gradient: WideGradient, name: str, device: torch.device) -> Tensor:  # shape: (elements of the factor,), int64
    """The place of each element of a factor, or of the bias, among those of its gradient."""

    def make() -> tuple[Tensor, ...]:
        places = gradient.hidden if name == "bias" else gradient.places[name].ravel()
        (held,) = np.nonzero(places >= 0)
        found = np.empty(len(held), np.int64)
        found[places[held]] = held
        return (torch.from_numpy(found).to(device),)

    return make_to_keep(make, device)[0]


@lru_cache(maxsize=256)
def _packer(gradient: WideGradient, dtype: torch.dtype, device: torch.device, biases: int) -> Packer:
    """Gives the images of second, first, last and third factor and, if there is one, a bias."""
    orders: list[Tensor] = [*make_to_keep(lambda: tuple(torch.from_numpy(order).to(device) for order in gradient.order), device)]

    def plainly(sources: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        together = torch.cat([*[source.reshape(-1) for source in sources], sources[0].new_zeros(1)])  # -1 takes the zero at the end
        return tuple(together[order].to(dtype) for order in orders[: len(orders) - 1 + biases])

    return Packer(plainly, HALF_MODES[dtype])
