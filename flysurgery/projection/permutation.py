"""The order of the hidden units between two layers that both become products of two factors."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flysurgery.factors import factor_to_dense
from flysurgery.patterns import Architecture
from flysurgery.projection.block_cycling import SWEEPS, block_cycling
from flysurgery.projection.grid import Grid

ROUNDS = 6
QUICK_SWEEPS = 2
"""Enough to compare orders by; the first sweep brings most of the gain."""


@dataclass(frozen=True)
class HiddenOrder:
    """Unit ``order[i]`` comes to place i: rows of the first matrix, columns of the second one.

    ``error_before`` and ``error_after`` are sums of the two squared relative errors; after is at most before.
    """

    order: Tensor  # shape: (hidden,), int64, on the CPU
    error_before: float
    error_after: float


@dataclass(frozen=True)
class Side:
    """One of the two matrices, float64, with the architecture that it gets and the metric of its inputs."""

    matrix: Tensor
    architecture: Architecture
    gram: Tensor


@torch.no_grad()
def choose_hidden_order(
    first: Side,  # shape of its matrix: (hidden, in_features)
    second: Side,  # (out_features, hidden)
) -> HiddenOrder:
    """Choose the order of the hidden units so that both matrices are near products of their architectures.

    A unit's place decides in which row class of the first product its row lies and in which column class of the second one its column.
    From a fit of both products each unit gets a price for every pair of classes: how far its row is from the span of that class in the
    first one, and its column in the second one. An assignment of units to places of least total price gives the next order, and so
    on, as in clustering by subspaces. The best order of all rounds is kept if a full fit confirms it, else the units stay where
    they are.

    Costs ``2*ROUNDS`` short fits, four full ones, and an assignment of hidden² entries a round.
    """
    from scipy.optimize import linear_sum_assignment

    hidden = len(first.matrix)
    places = Grid(first.architecture).row_class_of(), Grid(second.architecture).column_class_of()
    stay = torch.arange(hidden)
    order = best = stay
    lowest = float("inf")
    for _ in range(ROUNDS):
        here = _reordered(first, second, order)
        fits = [block_cycling(side.matrix, side.architecture, side.gram, sweeps=QUICK_SWEEPS) for side in here]
        error = sum(errors[-1] ** 2 for _, errors in fits)
        if error < lowest:
            lowest, best = error, order
        prices = _row_prices(here[0], fits[0][0][1])[:, places[0]] + _column_prices(here[1], fits[1][0][0])[:, places[1]]
        _, place = linear_sum_assignment(prices.cpu().numpy())
        moved = torch.empty_like(order)
        moved[torch.from_numpy(place)] = order
        if torch.equal(moved, order):
            break
        order = moved
    before = _full_error(_reordered(first, second, stay))
    after = before if torch.equal(best, stay) else _full_error(_reordered(first, second, best))
    return HiddenOrder(best, before, after) if after < before else HiddenOrder(stay, before, before)


def _reordered(first: Side, second: Side, order: Tensor) -> tuple[Side, Side]:
    index = order.to(second.gram.device)
    return (
        Side(first.matrix[index], first.architecture, first.gram),
        Side(second.matrix[:, index], second.architecture, second.gram[index][:, index]),
    )


def _full_error(sides: tuple[Side, Side]) -> float:
    return sum(block_cycling(side.matrix, side.architecture, side.gram, sweeps=SWEEPS)[1][-1] ** 2 for side in sides)


def _row_prices(
    side: Side,
    right: Tensor,  # the fitted K_2
) -> Tensor:  # shape: (hidden, row classes)
    """The share of the whole that a row loses if only the rows of K_2 of a row class are there to make it from."""
    rows, classes = factor_to_dense(right), Grid(side.architecture).row_class_of_inner()
    pulled = side.matrix @ side.gram
    energy = (pulled * side.matrix).sum(1)
    prices = []
    for number in range(Grid(side.architecture).row_classes):
        span = rows[classes.to(rows.device) == number]
        system = span @ side.gram @ span.mT
        made = pulled @ span.mT
        prices.append(energy - (made @ torch.linalg.pinv(system, hermitian=True) * made).sum(1))
    return torch.stack(prices, dim=1) / energy.sum()


def _column_prices(
    side: Side,
    left: Tensor,  # the fitted K_1
) -> Tensor:  # shape: (hidden, column classes)
    """The share of the whole that a column loses in the span of a column class's columns of K_1, weighted by how much its unit varies."""
    columns, classes = factor_to_dense(left), Grid(side.architecture).column_class_of_inner()
    energy = side.matrix.square().sum(0)
    weights = side.gram.diagonal()
    prices = []
    for number in range(Grid(side.architecture).column_classes):
        basis, size, _ = torch.linalg.svd(columns[:, classes.to(columns.device) == number], full_matrices=False)
        basis = basis[:, size > 1e-9 * size.max()]
        prices.append((energy - (basis.mT @ side.matrix).square().sum(0)) * weights)
    return torch.stack(prices, dim=1) / (side.matrix @ side.gram * side.matrix).sum()
