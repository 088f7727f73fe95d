"""The order of features that several layers share, which all become products of two factors."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias, TypeVar

import torch
from torch import Tensor

from flysurgery.factors import factor_to_dense
from flysurgery.patterns import Architecture
from flysurgery.projection.block_cycling import SWEEPS, Fitted
from flysurgery.projection.calibrated import FitProblem, fit_side_by_side, workers
from flysurgery.projection.two_factor import Classes, Grid, two_factor

T = TypeVar("T")
_Order: TypeAlias = tuple[Tensor, ...]
"""The order of each ``Features`` of a sharing."""

SHARES = (0.1, 0.2, 0.3, 0.45, 0.6, 0.8, 1.0, 1.0)
"""Of the directions of each class, those that count, round by round. All of them nearly hold the features that they were fitted to, which
then stay where they are; the strongest few are common to many features."""
QUICK_SWEEPS = 2
"""Enough to compare orders by; the first sweep brings most of the gain."""


@dataclass(frozen=True)
class Side:
    """One matrix, float64, with the architecture that it gets and the metric of its inputs.

    The features that move are its rows, or, if ``columns``, its columns, and then also those of ``gram``. ``name`` is for the caller.
    """

    matrix: Tensor
    architecture: Architecture
    gram: Tensor
    columns: bool = False
    name: str = ""

    @property
    def classes(self) -> Classes:
        """Those of the places; the price of a place is that of its class. Where there is one, no order is better than another."""
        grid = Grid(*self.architecture)
        return grid.columns if self.columns else grid.rows

    def reordered(self, order: Tensor) -> "Side":
        """The side with feature ``order[i]`` at place i."""
        index = order.to(self.gram.device)
        if not self.columns:
            return replace(self, matrix=self.matrix[index])
        return replace(self, matrix=self.matrix[:, index], gram=self.gram[index][:, index])


@dataclass(frozen=True)
class Features:
    """``count`` features that the ``sides`` share; ``free``: they may change places within their group, one by one."""

    count: int
    sides: tuple[Side, ...]
    free: bool


@dataclass(frozen=True)
class Orders:
    """For each ``Features`` its order: feature ``orders[f][i]`` comes to place i.

    ``before`` and ``after`` hold the squared relative error of each side; the sum of all is after at most what it was before.
    """

    orders: _Order  # each of shape (count,), int64, on the CPU
    before: tuple[tuple[float, ...], ...]
    after: tuple[tuple[float, ...], ...]

    @property
    def lowers(self) -> bool:
        return sum(map(sum, self.after)) < sum(map(sum, self.before))


@dataclass(frozen=True)
class Sharing:
    """Features whose orders depend on each other, in ``groups`` of equal length; with ``swap_groups`` these may change places."""

    features: tuple[Features, ...]
    groups: int
    swap_groups: bool


@torch.no_grad()
def choose_orders(sharings: Sequence[Sharing]) -> list[Orders]:
    """Choose for each of ``sharings`` the orders of its features so that all its sides are near products of their architectures.

    The features of each of its ``features`` fall into ``groups`` of equal length, one after the other, and stay together with their
    group. With ``swap_groups`` the groups may change places, all features in the same way. The hidden units of a feed-forward block are
    one group of one kind; attention has a group a head, and two kinds: rows of query and key, and rows of value with columns of what
    reads them.

    A feature's place decides in which row class of a product its row lies, or in which column class its column. From a fit of all sides
    each feature gets a price for every class: how far its row is from the span of that class, or its column. An assignment of features to
    places within each pair of groups, and then of groups to groups, of least total price gives the next orders, and so on, as in
    clustering by subspaces. The best of all rounds is kept if a full fit confirms it, else the features stay where they are.

    Draws no random numbers. Costs a short fit a side and round and two full ones, and assignments of ``count²`` entries a round. The
    sharings have nothing to do with each other, but that their fits are made side by side.
    """
    stay: list[_Order] = [tuple(torch.arange(each.count) for each in sharing.features) for sharing in sharings]
    orders, best = stay, list(stay)
    lowest = [float("inf")] * len(sharings)
    for share in SHARES:
        fits = _fits(sharings, orders, QUICK_SWEEPS, partial(_error_and_prices, share=share))
        for number, of_sharing in enumerate(fits):
            error = sum(squared for of_features in of_sharing for squared, _ in of_features)
            if error < lowest[number]:
                lowest[number], best[number] = error, orders[number]
        with workers() as pool:
            orders = list(pool.map(_next_order, sharings, orders, fits))
    before = _fits(sharings, stay, SWEEPS, _squared_error)
    moved = [number for number in range(len(sharings)) if best[number] is not stay[number]]
    confirmed = _fits([sharings[at] for at in moved], [best[at] for at in moved], SWEEPS, _squared_error)
    found = [Orders(order, errors, errors) for order, errors in zip(stay, before, strict=True)]
    for at, after in zip(moved, confirmed, strict=True):
        better = Orders(best[at], before[at], after)
        found[at] = better if better.lowers else found[at]
    return found


def _fits(
    sharings: Sequence[Sharing], orders: Sequence[_Order], sweeps: int, finish: Callable[[Side, Fitted], T]
) -> list[tuple[tuple[T, ...], ...]]:
    """What ``finish`` makes of the fit of each side, by sharing and features."""
    flat = [
        side.reordered(order)
        for sharing, of_sharing in zip(sharings, orders, strict=True)
        for features, order in zip(sharing.features, of_sharing, strict=True)
        for side in features.sides
    ]

    def finish_side(at: int, fitted: Fitted | None) -> T:
        assert fitted is not None  # sides have two factors
        return finish(flat[at], fitted)

    made = dict(fit_side_by_side([FitProblem(side.matrix, side.architecture, side.gram) for side in flat], finish_side, sweeps=sweeps))
    in_turn = (made[at] for at in range(len(flat)))
    return [tuple(tuple(next(in_turn) for _ in features.sides) for features in sharing.features) for sharing in sharings]


def _squared_error(side: Side, fitted: Fitted) -> float:
    return fitted.errors[-1] ** 2


def _error_and_prices(side: Side, fitted: Fitted, share: float) -> tuple[float, Tensor]:
    return _squared_error(side, fitted), _prices(side, two_factor(fitted.product.cpu(), *side.architecture), share)


def _next_order(sharing: Sharing, order: _Order, fits: Sequence[Sequence[tuple[float, Tensor]]]) -> _Order:
    """Bring the features to the cheapest places that the groups allow; ``fits`` are those of ``order``."""
    from scipy.optimize import linear_sum_assignment

    groups = sharing.groups
    pairs = [(one, other) for one in range(groups) for other in range(groups) if sharing.swap_groups or one == other]
    whole = torch.zeros(groups, groups, dtype=torch.float64)
    moves: list[dict[tuple[int, int], Tensor]] = []
    for features, of_sides in zip(sharing.features, fits, strict=True):
        prices = sum((price for _, price in of_sides), torch.zeros(features.count, features.count, dtype=torch.float64))
        length = features.count // groups
        blocks = prices.reshape(groups, length, groups, length).transpose(1, 2)
        moves.append({})
        for pair in pairs:
            place = torch.from_numpy(linear_sum_assignment(blocks[pair].numpy())[1]) if features.free else torch.arange(length)
            whole[pair] += blocks[pair][torch.arange(length), place].sum()
            moves[-1][pair] = pair[0] * length + torch.argsort(place)
    group_at = linear_sum_assignment(whole.numpy().T)[1] if sharing.swap_groups else range(groups)
    return tuple(
        of_features[torch.cat([move[int(group), place] for place, group in enumerate(group_at)])]
        for of_features, move in zip(order, moves, strict=True)
    )


@torch.no_grad()
def _prices(side: Side, fit: tuple[Tensor, Tensor], share: float) -> Tensor:  # shape: (features, places), float64, on the CPU
    """What each feature costs at each place, if ``share`` of the inner indices of each class are there to make it from, the strongest."""
    left, right = (factor_to_dense(factor).to(side.gram.device) for factor in fit)
    strength = left.square().sum(0) * (right @ side.gram * right).sum(1)
    classes, strongest = side.classes, []
    for number in range(classes.count):
        inner = (classes.of_inner == number).nonzero()[:, 0].to(strength.device)
        strongest.append(inner[strength[inner].argsort(descending=True, stable=True)[: max(1, round(share * len(inner)))]])
    if side.columns:
        prices = _column_prices(side, [left[:, inner] for inner in strongest])
    else:
        prices = _row_prices(side, [right[inner] for inner in strongest])  # shape: (features, classes)
    return prices.cpu()[:, classes.of_features]


def _row_prices(side: Side, spans: Sequence[Tensor]) -> Tensor:
    """The share of the whole that a row loses if only the ``spans``, the rows of K_2 of a row class, are there to make it from."""
    pulled = side.matrix @ side.gram
    energy = (pulled * side.matrix).sum(1)
    prices = []
    for span in spans:
        system = span @ side.gram @ span.mT
        made = pulled @ span.mT
        inverse = torch.linalg.pinv(system.cpu(), hermitian=True).to(made.device)  # small, and slow on a GPU
        prices.append(energy - (made @ inverse * made).sum(1))
    return torch.stack(prices, dim=1) / energy.sum()


def _column_prices(side: Side, spans: Sequence[Tensor]) -> Tensor:
    """The share of the whole that a column loses in the span of a class's columns of K_1, weighted by how much its feature varies.

    These columns are orthogonal: those of one block are left singular vectors, and the blocks of one column class lie in different rows.
    """
    energy = side.matrix.square().sum(0)
    weights = side.gram.diagonal()
    prices = []
    for span in spans:
        size = torch.linalg.vector_norm(span, dim=0)
        basis = span / size.where(size > 1e-9 * size.max(), float("inf"))
        prices.append((energy - (basis.mT @ side.matrix).square().sum(0)) * weights)
    return torch.stack(prices, dim=1) / (side.matrix @ side.gram * side.matrix).sum()
