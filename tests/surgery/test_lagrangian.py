"""The choice under a budget, held against all choices there are."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise, product

import pytest

from flysurgery.surgery.lagrangian import cost_of, hull_points, least_cost, least_error

NAMES = ("dense", "fine", "coarse", "odd")


def error_of(picks: Iterable[Choice]) -> float:
    return sum(choice.error for choice in picks)


@dataclass(frozen=True)
class Choice:
    name: str
    cost: float
    error: float


def units_of(seed: int, count: int = 3) -> list[list[Choice]]:
    """Units of different sizes whose dense choice has no error; "odd" ones may be bad, and not every unit has them."""
    draw = random.Random(seed)
    found: list[list[Choice]] = []
    for _ in range(count):
        size = draw.choice([4, 8, 16])
        rest = [Choice(name, draw.randint(1, 10) * size, size * draw.random()) for name in NAMES[1 : draw.choice([3, 4])]]
        found.append([Choice("dense", 10.0 * size, 0.0), *rest])
    return found


def every(units: list[list[Choice]]) -> list[tuple[float, float]]:
    return [(cost_of(picks), error_of(picks)) for picks in product(*units)]


@pytest.mark.parametrize("seed", range(8))
def test_choices_keep_to_their_bound_and_lie_between_the_hull_and_the_best_of_all(seed: int) -> None:
    units = units_of(seed)
    possible = every(units)
    hull = [(slope, cost_of(picks), error_of(picks)) for slope, picks in hull_points(units)]
    for multiplier, cost, error in hull:
        assert error == pytest.approx(min(e for c, e in possible if c <= cost + 1e-9), abs=1e-12)
        if multiplier < float("inf"):
            assert error + multiplier * cost == pytest.approx(min(e + multiplier * c for c, e in possible))
    assert (hull[0][1], hull[-1][2]) == (min(cost for cost, _ in possible), 0)
    assert all(left[0] >= right[0] for left, right in pairwise(hull))
    for share in (0.2, 0.4, 0.55, 0.8, 1.0):
        limit = share * sum(unit[0].cost for unit in units)
        picks = least_error(units, limit)
        within = [error for cost, error in possible if cost <= limit]
        assert (picks is None) == (not within)
        if picks is not None:
            assert cost_of(picks) <= limit
            assert min(within) - 1e-12 <= error_of(picks) <= min(error for _, cost, error in hull if cost <= limit) + 1e-12
    for limit in (0.0, 1.0, 5.0):
        picks = least_cost(units, limit)
        assert picks is not None and error_of(picks) <= limit
        assert min(c for c, e in possible if e <= limit) <= cost_of(picks) <= min(c for _, c, e in hull if e <= limit)


@pytest.mark.parametrize("seed", range(8))
def test_it_is_never_worse_than_one_name_for_all_at_equal_cost(seed: int) -> None:
    units = units_of(seed, count=6)
    for name in NAMES:
        alike = [choice for unit in units for choice in unit if choice.name == name]
        if len(alike) == len(units):
            picks = least_error(units, sum(choice.cost for choice in alike))
            assert picks is not None
            assert error_of(picks) <= sum(choice.error for choice in alike)
