"""One choice for each unit, so that the sum of the errors is least within a sum of costs."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
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


def cost_of(picks: Iterable[Choice]) -> float:
    """The sum of the costs."""
    return sum(pick.cost for pick in picks)


def hull_points(units: Sequence[Sequence[C]]) -> Iterator[tuple[C, ...]]:
    """Every solution of ``min error + multiplier * cost``, for any multiplier, from the cheapest on.

    A unit moves along the lower hull of its choices, and the steepest step of all units comes first. So each solution has the least
    error of all that cost no more.
    """
    hulls = [_hull(unit) for unit in units]
    steps = [((a.error - b.error) / (b.cost - a.cost), number, b) for number, hull in enumerate(hulls) for a, b in itertools.pairwise(hull)]
    picks = [hull[0] for hull in hulls]
    yield tuple(picks)
    for _, number, choice in sorted(steps, key=lambda step: -step[0]):
        picks[number] = choice
        yield tuple(picks)


def least_error(units: Sequence[Sequence[C]], limit: float) -> tuple[C, ...] | None:
    """A choice for each unit whose costs add up to at most ``limit``; None where there is none.

    The last solution of the Lagrangian within the limit, and then single changes as long as one that fits lowers the error. Where giving
    all units the choice of one name and going on from there does better, that is taken: so it never loses to any of these.
    """
    starts = [picks for picks in hull_points(units) if cost_of(picks) <= limit][-1:]
    for name in dict.fromkeys(choice.name for unit in units for choice in unit):
        uniform = tuple(choice for unit in units for choice in unit if choice.name == name)
        if len(uniform) == len(units) and cost_of(uniform) <= limit:
            starts.append(uniform)
    improved = [_improved(units, picks, limit) for picks in starts]
    return min(improved, key=lambda picks: sum(pick.error for pick in picks), default=None)


def _hull(unit: Sequence[C]) -> list[C]:
    """The choices on the lower convex hull, from the cheapest on, with errors that fall."""

    def is_above(first: C, middle: C, last: C) -> bool:
        return (middle.error - first.error) * (last.cost - first.cost) >= (last.error - first.error) * (middle.cost - first.cost)

    hull: list[C] = []
    for new in sorted(unit, key=lambda choice: (choice.cost, choice.error)):
        if hull and new.error >= hull[-1].error:
            continue
        while len(hull) > 1 and is_above(hull[-2], hull[-1], new):
            hull.pop()
        hull.append(new)
    return hull


def _improved(units: Sequence[Sequence[C]], picks: tuple[C, ...], limit: float) -> tuple[C, ...]:
    while True:
        best, best_gain = None, 0.0
        for number, (unit, now) in enumerate(zip(units, picks, strict=True)):
            for choice in unit:
                if now.error - choice.error > best_gain:
                    changed = (*picks[:number], choice, *picks[number + 1 :])
                    if cost_of(changed) <= limit:
                        best, best_gain = changed, now.error - choice.error
        if best is None:
            return picks
        picks = best
