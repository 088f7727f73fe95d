"""The choice under a budget, held against all choices there are."""

from __future__ import annotations

import random
from itertools import pairwise, product

import pytest

from flysurgery.surgery.lagrangian import Choice, Unit, cost_of, error_of, hull_points, least_cost, least_error

NAMES = ("dense", "fine", "coarse", "odd")


def toy(seed: int, units: int = 3) -> list[Unit]:
    """Units of different sizes whose dense choice has no error; "odd" ones may be bad, and not every unit has them."""
    draw = random.Random(seed)
    found: list[Unit] = []
    for _ in range(units):
        size = draw.choice([4, 8, 16])
        rest = [Choice(name, draw.randint(1, 10) * size, size * draw.random()) for name in NAMES[1 : draw.choice([3, 4])]]
        found.append([Choice("dense", 10.0 * size, 0.0), *rest])
    return found


def every(units: list[Unit]) -> list[tuple[float, float]]:
    picks = product(*(range(len(unit)) for unit in units))
    return [(cost_of(units, each), error_of(units, each)) for each in picks]


@pytest.mark.parametrize("seed", range(20))
def test_each_solution_of_the_lagrangian_has_the_least_error_of_all_that_cost_no_more(seed: int) -> None:
    units = toy(seed)
    points = [(slope, cost_of(units, picks), error_of(units, picks)) for slope, picks in hull_points(units)]
    for multiplier, cost, error in points:
        assert error == pytest.approx(min(e for c, e in every(units) if c <= cost + 1e-9), abs=1e-12)
        if multiplier < float("inf"):
            assert error + multiplier * cost == pytest.approx(min(e + multiplier * c for c, e in every(units)))
    assert points[0][1] == min(cost for cost, _ in every(units))
    assert points[-1][2] == 0
    assert all(left[0] >= right[0] for left, right in pairwise(points))


@pytest.mark.parametrize("seed", range(20))
def test_the_choice_keeps_to_the_budget_and_lies_between_the_hull_and_the_best_of_all(seed: int) -> None:
    units = toy(seed)
    whole = sum(unit[0].cost for unit in units)
    for share in (0.2, 0.4, 0.55, 0.8, 1.0):
        limit = share * whole
        picks = least_error(units, limit)
        possible = [error for cost, error in every(units) if cost <= limit]
        assert (picks is None) == (not possible)
        if picks is not None:
            assert cost_of(units, picks) <= limit
            below = [error_of(units, at) for _, at in hull_points(units) if cost_of(units, at) <= limit]
            assert min(possible) - 1e-12 <= error_of(units, picks) <= min(below) + 1e-12


@pytest.mark.parametrize("seed", range(20))
def test_it_is_never_worse_than_one_name_for_all_at_equal_cost(seed: int) -> None:
    units = toy(seed, units=6)
    for name in NAMES:
        uniform = [next((choice for choice in unit if choice.name == name), None) for unit in units]
        alike = [choice for choice in uniform if choice is not None]
        if len(alike) == len(units):
            picks = least_error(units, sum(choice.cost for choice in alike))
            assert picks is not None
            assert error_of(units, picks) <= sum(choice.error for choice in alike)


@pytest.mark.parametrize("seed", range(20))
def test_the_least_cost_keeps_to_the_error(seed: int) -> None:
    units = toy(seed)
    for limit in (0.0, 1.0, 5.0):
        picks = least_cost(units, limit)
        assert picks is not None
        assert error_of(units, picks) <= limit
        best = min(cost for cost, error in every(units) if error <= limit)
        hull = min(cost_of(units, at) for _, at in hull_points(units) if error_of(units, at) <= limit)
        assert best <= cost_of(units, picks) <= hull
