"""One choice for each unit, so that the sum of the errors is least within a sum of costs."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import attrgetter
from typing import Protocol, TypeVar


class Choice(Protocol):
    """What one unit may get: a name that is alike in all units, what it costs, and what it loses."""

    @property
    def name(self) -> str: ...
    @property
    def cost(self) -> float: ...
    @property
    def error(self) -> float: ...


C = TypeVar("C", bound=Choice)
Count = Callable[[Choice], float]
COST: Count = attrgetter("cost")
ERROR: Count = attrgetter("error")


def cost_of(picks: Iterable[Choice]) -> float:
    """The sum of the costs."""
    return sum(pick.cost for pick in picks)


def hull_points(units: Sequence[Sequence[C]], cost: Count = COST, error: Count = ERROR) -> Iterator[tuple[float, tuple[C, ...]]]:
    """Every solution of ``min error + multiplier * cost``, from the cheapest on, each with the largest multiplier that it belongs to.

    A unit moves along the lower hull of its choices, and the steepest step of all units comes first. So each solution has the least
    error of all that cost no more.
    """
    hulls = [_hull(unit, cost, error) for unit in units]
    steps = [
        ((error(a) - error(b)) / (cost(b) - cost(a)), number, b) for number, hull in enumerate(hulls) for a, b in itertools.pairwise(hull)
    ]
    picks = [hull[0] for hull in hulls]
    yield float("inf"), tuple(picks)
    for slope, number, choice in sorted(steps, key=lambda step: -step[0]):
        picks[number] = choice
        yield slope, tuple(picks)


def least_error(units: Sequence[Sequence[C]], limit: float, cost: Count = COST, error: Count = ERROR) -> tuple[C, ...] | None:
    """A choice for each unit whose costs add up to at most ``limit``; None where there is none.

    The last solution of the Lagrangian within the limit, and then single changes as long as one that fits lowers the error. Where giving
    all units the choice of one name and going on from there does better, that is taken: so it never loses to any of these.
    """
    starts = [picks for _, picks in hull_points(units, cost, error) if sum(map(cost, picks)) <= limit][-1:]
    for name in dict.fromkeys(choice.name for unit in units for choice in unit):
        uniform = tuple(choice for unit in units for choice in unit if choice.name == name)
        if len(uniform) == len(units) and sum(map(cost, uniform)) <= limit:
            starts.append(uniform)
    improved = [_improved(units, picks, limit, cost, error) for picks in starts]
    return min(improved, key=lambda picks: sum(map(error, picks)), default=None)


def least_cost(units: Sequence[Sequence[C]], limit: float) -> tuple[C, ...] | None:
    """A choice for each unit whose errors add up to at most ``limit``, for the least cost; None where there is none."""
    return least_error(units, limit, cost=ERROR, error=COST)


def least_error_but_first(units: Sequence[Sequence[C]]) -> tuple[C, ...]:
    """For each unit the choice of least error behind its first, which costs most; the first where it is the only one."""
    return tuple(min(unit[1:], key=ERROR, default=unit[0]) for unit in units)


def _hull(unit: Sequence[C], cost: Count, error: Count) -> list[C]:
    """The choices on the lower convex hull, from the cheapest on, with errors that fall."""

    def is_above(first: C, middle: C, last: C) -> bool:
        return (error(middle) - error(first)) * (cost(last) - cost(first)) >= (error(last) - error(first)) * (cost(middle) - cost(first))

    hull: list[C] = []
    for new in sorted(unit, key=lambda choice: (cost(choice), error(choice))):
        if hull and error(new) >= error(hull[-1]):
            continue
        while len(hull) > 1 and is_above(hull[-2], hull[-1], new):
            hull.pop()
        hull.append(new)
    return hull


def _improved(units: Sequence[Sequence[C]], picks: tuple[C, ...], limit: float, cost: Count, error: Count) -> tuple[C, ...]:
    while True:
        best, best_gain = None, 0.0
        for number, (unit, now) in enumerate(zip(units, picks, strict=True)):
            for choice in unit:
                if error(now) - error(choice) > best_gain:
                    changed = (*picks[:number], choice, *picks[number + 1 :])
                    if sum(map(cost, changed)) <= limit:
                        best, best_gain = changed, error(now) - error(choice)
        if best is None:
            return picks
        picks = best
