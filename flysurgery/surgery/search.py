"""The costs at which a model meets a goal that only the whole model shows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from flysurgery.surgery.allocation import Allocation, Rule
from flysurgery.surgery.lagrangian import Picks, least_error
from flysurgery.surgery.plan import Plan

STEPS = 6
"""Halvings of the range of costs, so the result lies within a 64th of that range."""

Seen = TypeVar("Seen")
"""What is seen of a whole model."""


class Trials(Generic[Seen]):
    """Plans of least predicted error within different costs, each tried once; ``seen`` has the share of the costs and what was seen."""

    def __init__(self, allocation: Allocation, see: Callable[[Plan], Seen], meets: Callable[[Seen], bool]) -> None:
        self._allocation, self._see, self._meets = allocation, see, meets
        self._by_picks: dict[Picks, Seen] = {}
        self.seen: list[tuple[float, Seen]] = []

    def at(self, cost: float) -> Seen:
        """What is seen of the plan of least error that costs no more."""
        picks = within(cost)(self._allocation.choices)
        assert picks is not None  # no cost below the least is asked for
        if picks not in self._by_picks:
            self._by_picks[picks] = self._see(self._allocation.plan_of(picks))
            self.seen.append((self._allocation.share(picks), self._by_picks[picks]))
        return self._by_picks[picks]

    def meets(self, cost: float) -> bool:
        """Whether that plan meets the goal."""
        return self._meets(self.at(cost))

    def bisect(self, good: float, bad: float) -> float:
        """The cost nearest to ``bad`` that meets the goal, after ``STEPS`` halvings; ``good`` meets it and ``bad`` does not."""
        for _ in range(STEPS):
            middle = (good + bad) / 2
            good, bad = (middle, bad) if self.meets(middle) else (good, middle)
        return good


def within(cost: float) -> Rule:
    """Least error within a cost."""
    return lambda choices: least_error(choices, cost)
