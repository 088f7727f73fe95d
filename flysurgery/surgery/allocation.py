"""All choices of architectures for the layers of a plan: what each costs and loses, and the plans that are made of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Generic, TypeAlias, TypeVar

from flysurgery.errors import PlanError
from flysurgery.patterns import family_of
from flysurgery.surgery.choices import Point, Search, Tradeoff
from flysurgery.surgery.lagrangian import cost_of, hull_points, least_error
from flysurgery.surgery.option_errors import Option, Seen, Unit
from flysurgery.surgery.plan import Part, Plan, Reason
from flysurgery.surgery.projecting import NO_ERROR

DENSE = "dense"
CURVE_POINTS = 12
FAMILIES = ("monarch", "gonon", "low rank")

STEPS = 6
"""Halvings of the range of costs, so the result lies within a 64th of that range."""

T = TypeVar("T")
"""The result of a trial with a whole model."""

Picks: TypeAlias = tuple[Option, ...]
"""The option of each unit."""

Rule: TypeAlias = Callable[[Sequence[Sequence[Option]]], Picks | None]
"""Picks an option for each unit; None where none suits."""


@dataclass(frozen=True)
class Allocation:
    """The units of ``plan`` with the errors of their options. Costs are counted in ``unit``, "weights" or "ms".

    ``seen`` is what calibration data show; None where there are none.
    """

    plan: Plan
    units: Sequence[Unit]
    unit: str
    seen: Seen | None

    @cached_property
    def options(self) -> list[Sequence[Option]]:
        """What a ``Rule`` chooses from: for each unit its options, dense first."""
        return [unit.options for unit in self.units]

    @cached_property
    def whole(self) -> float:
        """What all layers cost dense."""
        return cost_of(options[0] for options in self.options)

    @cached_property
    def least(self) -> float:
        """What all layers cost with the cheapest choice of each."""
        return sum(min(option.cost for option in options) for options in self.options)

    @cached_property
    def reference(self) -> float:
        """What squared errors are relative to."""
        return sum(options[0].chosen_by.reference for options in self.options)

    def plan_of(self, picks: Picks) -> Plan:
        """The plan with the architectures picked.

        Raises:
            PlanError: every layer stays dense.
        """
        share = cost_of(picks) / self.whole
        text = f"the budget is best kept with this layer dense, at a share of {share:.3f} of the {self.unit} in all"
        parts: dict[str, list[Part]] = {}
        reasons: dict[str, Reason] = {}
        for unit, option in zip(self.units, picks, strict=True):
            for (layer, of_layer), architecture in zip(unit.members, option.architectures, strict=True):
                parts.setdefault(layer.fqn, []).extend(replace(part, architecture=architecture) for part in of_layer)
                reasons[layer.fqn] = unit.dense_reason or Reason("budget", text)
        replaced = {
            fqn: tuple(sorted(found, key=lambda part: part.start)) for fqn, found in parts.items() if any(p.architecture for p in found)
        }
        layers = tuple(replace(layer, parts=replaced.get(layer.fqn, layer.parts)) for layer in self.plan.layers)
        new = replace(self.plan, layers=layers).keeping({fqn: reason for fqn, reason in reasons.items() if fqn not in replaced})
        if new.replaced:
            return new
        raise PlanError("nothing would be replaced: every layer does best dense; give a smaller budget, or a larger max-error")

    def chosen(self, rule: Rule, goal: str, search: Search | None = None) -> tuple[Plan, Tradeoff]:
        """The plan that ``rule`` chooses, and the trade-off, which also has what the rule chooses of each family alone.

        ``goal`` says in words what the rule looks for, and ``search`` how it was found. Raises ``PlanError`` as ``plan_of`` does.
        """
        picks = rule(self.options)
        assert picks is not None  # callers see to it that the cheapest suits, or dense
        plan = self.plan_of(picks)
        tradeoff = Tradeoff(
            unit=self.unit,
            weighted=self.seen is not None,
            chosen=self._point(picks),
            curve=_spread([self._point(picks, slope) for slope, picks in hull_points(self.options)]),
            samples=self.seen and self.seen.split,
            goal=goal,
            families=self._families(plan),
            alone=tuple(self._alone(rule)),
            search=search,
        )
        return plan, tradeoff

    def after_return(self, plan: Plan, tradeoff: Tradeoff) -> Tradeoff:
        """``tradeoff`` with ``plan`` as the chosen one, in which some layers went back to dense."""
        planned = {(layer.fqn, part.start): part.architecture for layer in plan.replaced for part in layer.parts}
        picks = tuple(
            next(option for option in unit.options if option.architectures == tuple(planned.get(key) for key in _first_parts(unit)))
            for unit in self.units
        )
        goal = f"{tradeoff.goal}, less what made the whole model slower"
        return replace(tradeoff, chosen=self._point(picks), goal=goal, families=self._families(plan), alone=())

    def _point(self, picks: Picks, slope: float = float("inf")) -> Point:
        cost = cost_of(picks)
        chosen_by = sum((option.chosen_by for option in picks), NO_ERROR).relative
        held_out = None if self.seen is None else sum((option.held_out for option in picks), NO_ERROR).relative
        return Point(None if slope == float("inf") else slope, cost, cost / self.whole, chosen_by, held_out)

    def _families(self, plan: Plan) -> tuple[tuple[str, int], ...]:
        """How many of the layers to choose for got which family, most first; "dense" is last."""
        found = {layer.fqn: layer.family for layer in plan.replaced}
        counts = Counter(found.get(layer.fqn) or DENSE for layer in self.plan.replaced)
        return tuple(sorted(counts.items(), key=lambda each: (each[0] == DENSE, -each[1])))

    def _alone(self, rule: Rule) -> Iterator[tuple[str, Point | None]]:
        """What the rule makes of dense and one family, for each family that there is."""
        for family in FAMILIES:
            kept = [[options[0], *(option for option in options[1:] if _is_of(option, family))] for options in self.options]
            if any(len(options) > 1 for options in kept):
                picks = rule(kept)
                yield family, None if picks is None else self._point(picks)


class Trials(Generic[T]):
    """Tries plans of least predicted error within different costs, each plan once; ``seen`` has their shares of the costs and results."""

    def __init__(self, allocation: Allocation, see: Callable[[Plan], T], meets: Callable[[T], bool]) -> None:
        self._allocation, self._see, self._meets = allocation, see, meets
        self._by_picks: dict[Picks, T] = {}
        self.seen: list[tuple[float, T]] = []

    def at(self, cost: float) -> T:
        """The result of the plan of least error within this cost."""
        picks = within(cost)(self._allocation.options)
        assert picks is not None  # no cost below the least is asked for
        if picks not in self._by_picks:
            self._by_picks[picks] = self._see(self._allocation.plan_of(picks))
            self.seen.append((cost_of(picks) / self._allocation.whole, self._by_picks[picks]))
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
    """The rule of least error within a cost."""
    return lambda options: least_error(options, cost)


def _first_parts(unit: Unit) -> list[tuple[str, int]]:
    """One part of each layer, which all get the same."""
    return [(layer.fqn, parts[0].start) for layer, parts in unit.members]


def _is_of(option: Option, family: str) -> bool:
    return all(each is not None and family_of(each) == family for each in option.architectures)


def _spread(curve: Sequence[Point]) -> tuple[Point, ...]:
    """A dozen points of the curve, its ends among them, at even distances of cost."""
    low, high = curve[0].cost, curve[-1].cost
    wanted = [low + (high - low) * step / (CURVE_POINTS - 1) for step in range(CURVE_POINTS)]
    return tuple(dict.fromkeys(min(curve, key=lambda point: abs(point.cost - cost)) for cost in wanted))
