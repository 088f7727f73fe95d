"""All choices of architectures for the layers of a plan: what each costs and loses, the and the plans that are made of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Generic, TypeAlias, TypeVar

from flysurgery.calibration import Samples
from flysurgery.errors import PlanError
from flysurgery.patterns import family_of
from flysurgery.surgery import lagrangian
from flysurgery.surgery.choices import Point, Search, Split, Tradeoff
from flysurgery.surgery.lagrangian import Choice, Picks, cost_of, hull_points, least_error
from flysurgery.surgery.option_errors import Errors, Unit
from flysurgery.surgery.plan import Part, Plan, Reason
from flysurgery.surgery.projecting import NO_ERROR

DENSE = "dense"
CURVE_POINTS = 12
FAMILIES = ("monarch", "gonon", "low rank")

STEPS = 6
"""Halvings of the range of costs, so the result lies within a 64th of that range."""

Seen = TypeVar("Seen")
"""What is seen of a whole model."""

Rule: TypeAlias = Callable[[Sequence[lagrangian.Unit]], Picks | None]
"""Makes one choice for each unit; None where none suits."""


@dataclass(frozen=True)
class Allocation:
    """The units of ``plan`` with their errors. Costs are counted in ``unit``, "weights" or "ms".

    ``samples`` are the calibration data, and ``split`` says how they were shared out; None where there are none.
    """

    plan: Plan
    units: Sequence[Unit]
    errors: Sequence[Errors]
    unit: str
    samples: Samples | None
    split: Split | None

    @cached_property
    def choices(self) -> list[list[Choice]]:
        """What a ``Rule`` chooses from: for each unit its options, dense first, with the squared errors to choose by."""
        return [
            [Choice(name, unit.costs[name], each[name][0].squared) for name in unit.options]
            for unit, each in zip(self.units, self.errors, strict=True)
        ]

    @cached_property
    def whole(self) -> float:
        """What all layers cost dense."""
        return sum(unit.costs[DENSE] for unit in self.units)

    @cached_property
    def least(self) -> float:
        """What all layers cost with the cheapest choice of each."""
        return sum(min(unit.costs.values()) for unit in self.units)

    @cached_property
    def reference(self) -> float:
        """What squared errors are relative to."""
        return sum(each[DENSE][0].reference for each in self.errors)

    def share(self, picks: Picks) -> float:
        """The share of the dense layers' costs."""
        return cost_of(self.choices, picks) / self.whole

    def plan_of(self, picks: Picks) -> Plan:
        """The plan with the architectures picked.

        Raises:
            PlanError: every layer stays dense.
        """
        text = f"the budget is best kept with this layer dense, at a share of {self.share(picks):.3f} of the {self.unit} in all"
        parts: dict[str, list[Part]] = {}
        reasons: dict[str, Reason] = {}
        for unit, choices, pick in zip(self.units, self.choices, picks, strict=True):
            for (layer, of), architecture in zip(unit.members, unit.options[choices[pick].name], strict=True):
                parts.setdefault(layer.fqn, []).extend(replace(part, architecture=architecture) for part in of)
                reasons[layer.fqn] = unit.dense_reason or Reason("budget", text)
        replaced = {
            fqn: tuple(sorted(found, key=lambda part: part.start)) for fqn, found in parts.items() if any(p.architecture for p in found)
        }
        layers = tuple(replace(layer, parts=replaced[layer.fqn]) if layer.fqn in replaced else layer for layer in self.plan.layers)
        new = replace(self.plan, layers=layers).keeping({fqn: reason for fqn, reason in reasons.items() if fqn not in replaced})
        if new.replaced:
            return new
        raise PlanError("nothing would be replaced: every layer does best dense; give a smaller budget, or a larger max-error")

    def chosen(self, rule: Rule, goal: str, search: Search | None = None) -> tuple[Plan, Tradeoff]:
        """The plan that ``rule`` makes, and the trade-off, with what the rule makes of one family alone beside it.

        ``goal`` says in words what the rule looks for, and ``search`` how it was found. Raises PlanError as ``plan_of`` does.
        """
        picks = rule(self.choices)
        assert picks is not None  # callers see to it that the cheapest suits, or dense
        plan = self.plan_of(picks)
        tradeoff = Tradeoff(
            unit=self.unit,
            weighted=self.split is not None,
            chosen=self._point(picks),
            curve=_spread([self._point(picks, slope) for slope, picks in hull_points(self.choices)]),
            samples=self.split,
            goal=goal,
            families=self._families(plan),
            alone=tuple((family, self._alone(rule, family)) for family in FAMILIES if self._has(family)),
            search=search,
        )
        return plan, tradeoff

    def after_return(self, plan: Plan, tradeoff: Tradeoff) -> Tradeoff:
        """``tradeoff`` with ``plan`` as the chosen one, in which some layers went back to dense."""
        picks = tuple(
            next(index for index, choice in enumerate(choices) if _is_in(plan, unit, choice.name))
            for unit, choices in zip(self.units, self.choices, strict=True)
        )
        goal = f"{tradeoff.goal}, less what made the whole model slower"
        return replace(tradeoff, chosen=self._point(picks), goal=goal, families=self._families(plan), alone=())

    def _point(self, picks: Picks, slope: float = float("inf")) -> Point:
        cost = cost_of(self.choices, picks)
        by, held_out = NO_ERROR, NO_ERROR
        for errors, choices, pick in zip(self.errors, self.choices, picks, strict=True):
            by, held_out = by + errors[choices[pick].name][0], held_out + errors[choices[pick].name][1]
        multiplier = None if slope == float("inf") else slope
        return Point(multiplier, cost, cost / self.whole, by.relative, None if self.split is None else held_out.relative)

    def _families(self, plan: Plan) -> tuple[tuple[str, int], ...]:
        """How many of the layers to choose for got which family, most first; "dense" is last."""
        found = {layer.fqn: layer.family for layer in plan.replaced}
        counts = Counter(found.get(layer.fqn) or DENSE for layer in self.plan.replaced)
        return tuple(sorted(counts.items(), key=lambda each: (each[0] == DENSE, -each[1])))

    def _has(self, family: str) -> bool:
        return any(_is_of(unit, name, family) for unit in self.units for name in unit.options)

    def _alone(self, rule: Rule, family: str) -> Point | None:
        """What the rule makes of dense and one family."""
        kept = [
            [index for index, choice in enumerate(found) if choice.name == DENSE or _is_of(unit, choice.name, family)]
            for unit, found in zip(self.units, self.choices, strict=True)
        ]
        picks = rule([[found[index] for index in indices] for indices, found in zip(kept, self.choices, strict=True)])
        return None if picks is None else self._point(tuple(indices[pick] for indices, pick in zip(kept, picks, strict=True)))


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


def _is_in(plan: Plan, unit: Unit, name: str) -> bool:
    """Whether ``plan`` gives the unit the option of that name."""
    planned = {(layer.fqn, part.start): part.architecture for layer in plan.replaced for part in layer.parts}
    members = zip(unit.members, unit.options[name], strict=True)
    return all(planned.get((layer.fqn, part.start)) == architecture for (layer, parts), architecture in members for part in parts)


def _is_of(unit: Unit, name: str, family: str) -> bool:
    return all(each is not None and family_of(each) == family for each in unit.options[name])


def _spread(curve: Sequence[Point]) -> tuple[Point, ...]:
    """A dozen points of the curve, its ends among them, at even distances of cost."""
    low, high = curve[0].cost, curve[-1].cost
    wanted = [low + (high - low) * step / (CURVE_POINTS - 1) for step in range(CURVE_POINTS)]
    return tuple(dict.fromkeys(min(curve, key=lambda point: abs(point.cost - cost)) for cost in wanted))
