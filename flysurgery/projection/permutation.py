"""The order of features that several layers share, which all become products of two factors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flysurgery.factors import factor_to_dense
from flysurgery.patterns import Architecture
from flysurgery.projection.block_cycling import SWEEPS, block_cycling
from flysurgery.projection.grid import Grid

SHARES = (0.1, 0.2, 0.3, 0.45, 0.6, 0.8, 1.0, 1.0)
"""Of the directions of each class, those that count, round by round. All of them nearly hold the features that they were fitted to, which
then stay where they are; the strongest few are common to many features."""
QUICK_SWEEPS = 2
"""Enough to compare orders by; the first sweep brings most of the gain."""


@dataclass(frozen=True)
class Side:
    """One matrix, float64, with the architecture that it gets and the metric of its inputs.

    The features that move are its rows, or, if ``columns``, its columns, and then also those of ``gram``.
    """

    matrix: Tensor
    architecture: Architecture
    gram: Tensor
    columns: bool = False

    @property
    def place_classes(self) -> Tensor:  # shape: (features,)
        """The class that each place belongs to."""
        grid = Grid(self.architecture)
        return grid.column_class_of() if self.columns else grid.row_class_of()

    @property
    def is_indifferent(self) -> bool:
        """Whether all places are in one class, so that no order is better than another."""
        grid = Grid(self.architecture)
        return (grid.column_classes if self.columns else grid.row_classes) == 1

    def reordered(self, order: Tensor) -> Side:
        """The side with feature ``order[i]`` at place i."""
        index = order.to(self.gram.device)
        if not self.columns:
            return Side(self.matrix[index], self.architecture, self.gram)
        return Side(self.matrix[:, index], self.architecture, self.gram[index][:, index], columns=True)

    def fit(self, sweeps: int) -> tuple[tuple[Tensor, Tensor], float]:
        """Factors, and the square of their relative error."""
        factors, errors = block_cycling(self.matrix, self.architecture, self.gram, sweeps=sweeps)
        return factors, errors[-1] ** 2


@dataclass(frozen=True)
class Features:
    """``count`` features that the ``sides`` share; ``free``: they may change places within their group, one by one."""

    count: int
    sides: tuple[Side, ...]
    free: bool = True


@dataclass(frozen=True)
class Orders:
    """For each ``Features`` its order: feature ``orders[f][i]`` comes to place i.

    ``before`` and ``after`` hold the squared relative error of each side; the sum of all is after at most what it was before.
    """

    orders: tuple[Tensor, ...]  # shape: (count,), int64, on the CPU
    before: tuple[tuple[float, ...], ...]
    after: tuple[tuple[float, ...], ...]

    @property
    def lowers(self) -> bool:
        """Whether the orders are better than the features' own."""
        return sum(map(sum, self.after)) < sum(map(sum, self.before))


@torch.no_grad()
def choose_orders(features: Sequence[Features], *, groups: int = 1, swap_groups: bool = False) -> Orders:
    """Choose the orders of features so that all sides are near products of their architectures.

    The features of each of ``features`` fall into ``groups`` of equal length, one after the other, and stay together with their
    group. With ``swap_groups`` the groups may change places, all features in the same way. The hidden units of a feed-forward block are
    one group of one kind; attention has a group a head, and two kinds: rows of query and key, and rows of value with columns of what
    reads them.

    A feature's place decides in which row class of a product its row lies, or in which column class its column. From a fit of all sides
    each feature gets a price for every class: how far its row is from the span of that class, or its column. An assignment of features to
    places within each pair of groups, and then of groups to groups, of least total price gives the next orders, and so on, as in
    clustering by subspaces. The best of all rounds is kept if a full fit confirms it, else the features stay where they are.

    Draws no random numbers. Costs a short fit a side and round and two full ones, and assignments of ``count²`` entries a round.
    """
    stay = tuple(torch.arange(each.count) for each in features)
    orders = best = stay
    lowest = float("inf")
    for share in SHARES:
        fits = [[side.reordered(order).fit(QUICK_SWEEPS) for side in each.sides] for each, order in zip(features, orders, strict=True)]
        error = sum(squared for of_features in fits for _, squared in of_features)
        if error < lowest:
            lowest, best = error, orders
        prices = [
            sum(
                (_prices(side.reordered(order), fit, share) for side, (fit, _) in zip(each.sides, of_features, strict=True)),
                _none(each.count),
            )
            for each, order, of_features in zip(features, orders, fits, strict=True)
        ]
        moves = _assigned(prices, [each.free for each in features], groups, swap_groups)
        orders = tuple(order[move] for order, move in zip(orders, moves, strict=True))
    before = _full_errors(features, stay)
    found = Orders(best, before, _full_errors(features, best) if best is not stay else before)
    return found if found.lowers else Orders(stay, before, before)


def _none(count: int) -> Tensor:
    return torch.zeros(count, count, dtype=torch.float64)


def _full_errors(features: Sequence[Features], orders: Sequence[Tensor]) -> tuple[tuple[float, ...], ...]:
    return tuple(tuple(side.reordered(order).fit(SWEEPS)[1] for side in each.sides) for each, order in zip(features, orders, strict=True))


def _assigned(
    prices: Sequence[Tensor],  # of each features, shape: (count, count), what it costs to have a feature at a place
    free: Sequence[bool],
    groups: int,
    swap_groups: bool,
) -> list[Tensor]:  # for each features the one that comes to each place, shape: (count,)
    """The cheapest places that the groups allow."""
    from scipy.optimize import linear_sum_assignment

    blocks = [each.reshape(groups, len(each) // groups, groups, len(each) // groups).transpose(1, 2) for each in prices]
    pairs = [(one, other) for one in range(groups) for other in range(groups) if swap_groups or one == other]
    whole = torch.zeros(groups, groups, dtype=torch.float64)
    within: list[dict[tuple[int, int], Tensor]] = [{} for _ in prices]
    for number, of_features in enumerate(blocks):
        for pair in pairs:
            block = of_features[pair]
            place = torch.from_numpy(linear_sum_assignment(block.numpy())[1]) if free[number] else torch.arange(len(block))
            whole[pair] += block[torch.arange(len(block)), place].sum()
            within[number][pair] = torch.argsort(place)
    group_at = linear_sum_assignment(whole.numpy().T)[1] if swap_groups else range(groups)
    return [
        torch.cat([int(group) * each.shape[2] + of_features[int(group), place] for place, group in enumerate(group_at)])
        for each, of_features in zip(blocks, within, strict=True)
    ]


def _prices(side: Side, fit: tuple[Tensor, Tensor], share: float) -> Tensor:  # shape: (features, places), float64, on the CPU
    """What each feature costs at each place, if ``share`` of the inner indices of each class are there to make it from, the strongest."""
    left, right = (factor_to_dense(factor) for factor in fit)
    strength = left.square().sum(0) * (right @ side.gram * right).sum(1)
    grid = Grid(side.architecture)
    classes = grid.column_class_of_inner() if side.columns else grid.row_class_of_inner()
    count = grid.column_classes if side.columns else grid.row_classes
    strongest = [_strongest((classes == number).nonzero()[:, 0].to(strength.device), strength, share) for number in range(count)]
    if side.columns:
        prices = _column_prices(side, [left[:, of_class] for of_class in strongest])
    else:
        prices = _row_prices(side, [right[of_class] for of_class in strongest])
    return prices.cpu()[:, side.place_classes]


def _strongest(of_class: Tensor, strength: Tensor, share: float) -> Tensor:
    return of_class[strength[of_class].argsort(descending=True, stable=True)[: max(1, round(share * len(of_class)))]]


def _row_prices(
    side: Side,
    spans: Sequence[Tensor],  # rows of K_2 of each class
) -> Tensor:  # shape: (features, row classes)
    """The share of the whole that a row loses if only the rows of K_2 of a row class are there to make it from."""
    pulled = side.matrix @ side.gram
    energy = (pulled * side.matrix).sum(1)
    prices = []
    for span in spans:
        system = span @ side.gram @ span.mT
        made = pulled @ span.mT
        prices.append(energy - (made @ torch.linalg.pinv(system, hermitian=True) * made).sum(1))
    return torch.stack(prices, dim=1) / energy.sum()


def _column_prices(
    side: Side,
    spans: Sequence[Tensor],  # columns of K_1 of each class
) -> Tensor:  # shape: (features, column classes)
    """The share of the whole that a column loses in the span of a class's columns of K_1, weighted by how much its feature varies."""
    energy = side.matrix.square().sum(0)
    weights = side.gram.diagonal()
    prices = []
    for span in spans:
        basis, size, _ = torch.linalg.svd(span, full_matrices=False)
        basis = basis[:, size > 1e-9 * size.max()]
        prices.append((energy - (basis.mT @ side.matrix).square().sum(0)) * weights)
    return torch.stack(prices, dim=1) / (side.matrix @ side.gram * side.matrix).sum()
