"""One choice for each unit, so that the sum of the errors is least within a sum of costs."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Choice:
    """What one unit may get: a name that is alike in all units, what it costs, and what it loses."""

    name: str
    cost: float
    error: float


Unit = Sequence[Choice]
Picks = tuple[int, ...]
"""The number of the choice of each unit."""


def cost_of(units: Sequence[Unit], picks: Picks) -> float:
    """The sum of the costs."""
    return sum(unit[pick].cost for unit, pick in zip(units, picks, strict=True))


def error_of(units: Sequence[Unit], picks: Picks) -> float:
    """The sum of the errors."""
    return sum(unit[pick].error for unit, pick in zip(units, picks, strict=True))


def hull_points(units: Sequence[Unit]) -> Iterator[tuple[float, Picks]]:
    """Every solution of ``min error + multiplier * cost``, from the cheapest on, each with the largest multiplier that it belongs to.

    A unit moves along the lower hull of its choices, and the steepest step of all units comes first. So each solution has the least
    error of all that cost no more.
    """
    hulls = [_hull(unit) for unit in units]
    steps = [
        ((unit[a].error - unit[b].error) / (unit[b].cost - unit[a].cost), number, b)
        for number, (unit, hull) in enumerate(zip(units, hulls, strict=True))
        for a, b in itertools.pairwise(hull)
    ]
    picks = [hull[0] for hull in hulls]
    yield float("inf"), tuple(picks)
    for slope, number, pick in sorted(steps, key=lambda step: -step[0]):
        picks[number] = pick
        yield slope, tuple(picks)


def least_error(units: Sequence[Unit], limit: float) -> Picks | None:
    """A choice for each unit whose costs add up to at most ``limit``; None where there is none.

    The last solution of the Lagrangian within the limit, and then single changes as long as one that fits lowers the error. Where giving
    all units the choice of one name and going on from there does better, that is taken: so it never loses to any of these.
    """
    starts = [picks for _, picks in hull_points(units) if cost_of(units, picks) <= limit][-1:]
    for name in dict.fromkeys(choice.name for unit in units for choice in unit):
        uniform = tuple(next((i for i, choice in enumerate(unit) if choice.name == name), -1) for unit in units)
        if -1 not in uniform and cost_of(units, uniform) <= limit:
            starts.append(uniform)
    return min((_improved(units, picks, limit) for picks in starts), key=lambda picks: error_of(units, picks), default=None)


def least_cost(units: Sequence[Unit], limit: float) -> Picks | None:
    """A choice for each unit whose errors add up to at most ``limit``, for the least cost; None where there is none."""
    return least_error([[Choice(each.name, each.error, each.cost) for each in unit] for unit in units], limit)


def least_error_but_first(units: Sequence[Unit]) -> Picks:
    """For each unit the choice of least error behind its first, which costs most; the first where it is the only one."""
    return tuple(min(range(1, len(unit)), key=lambda index: unit[index].error, default=0) for unit in units)


def _hull(unit: Unit) -> list[int]:
    """The choices on the lower convex hull, from the cheapest on, with errors that fall."""
    hull: list[int] = []
    for index in sorted(range(len(unit)), key=lambda i: (unit[i].cost, unit[i].error)):
        new = unit[index]
        if hull and new.error >= unit[hull[-1]].error:
            continue
        while len(hull) > 1 and _is_above(unit[hull[-2]], unit[hull[-1]], new):
            hull.pop()
        hull.append(index)
    return hull


def _is_above(first: Choice, middle: Choice, last: Choice) -> bool:
    return (middle.error - first.error) * (last.cost - first.cost) >= (last.error - first.error) * (middle.cost - first.cost)


def _improved(units: Sequence[Unit], picks: Picks, limit: float) -> Picks:
    while True:
        best, best_gain = None, 0.0
        for number, unit in enumerate(units):
            now = unit[picks[number]]
            for index, choice in enumerate(unit):
                if now.error - choice.error > best_gain:
                    changed = (*picks[:number], index, *picks[number + 1 :])
                    if cost_of(units, changed) <= limit:
                        best, best_gain = changed, now.error - choice.error
        if best is None:
            return picks
        picks = best
