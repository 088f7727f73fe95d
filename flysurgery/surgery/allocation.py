"""Share a budget among the layers of a plan: each gets the architecture that suits all of them together."""

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeAlias

from torch import nn

from flysurgery.calibration import Data
from flysurgery.errors import OptionError, PatternError, PlanError, Reason
from flysurgery.fidelity import Progress
from flysurgery.patterns import Architecture, gonon, low_rank, monarch
from flysurgery.projection import OutputError
from flysurgery.surgery.apply import check_calibration, check_plan, check_weights
from flysurgery.surgery.choices import Point, TimedGroup, Tradeoff
from flysurgery.surgery.option_errors import Option, Unit, judge, look
from flysurgery.surgery.plan import LayerPlan, Part, Plan

PLACEHOLDER = "lowrank"
"""The family to plan with before an allocation: it fits matrices of any sizes."""

DENSE = "dense"
CURVE_POINTS = 12
NBLOCKS = (2, 4, 8, 16)

Picks: TypeAlias = tuple[Option, ...]
"""The option of each unit."""


def check_budget(budget: float | None, *, measured: bool, named: Sequence[str], fidelity: float | None = None) -> bool:
    """Whether an allocation chooses the architectures: by ``budget``, by ``fidelity``, or by times that are ``measured``.

    Raises:
        OptionError: a budget or a fidelity out of its range, both, or options that name architectures, ``named``, beside a choice.
    """
    if budget is not None and not (isinstance(budget, int | float) and 0 < budget <= 1):
        raise OptionError(f"budget is the share of the dense layers' costs to keep, above 0 and at most 1; got {budget!r}")
    if fidelity is not None and not (isinstance(fidelity, int | float) and 0 < fidelity < 1):
        raise OptionError(f"fidelity is the least cosine with the dense model to reach, above 0 and below 1; got {fidelity!r}")
    if fidelity is not None and (budget is not None or measured):
        raise OptionError("fidelity looks for the smallest budget of weights itself; leave budget and measure out")
    if budget is None and fidelity is None and not measured:
        return False
    if named:
        raise OptionError(f"budget, fidelity and measure choose the architectures, so {' and '.join(named)} cannot be given with them")
    return True


def allocate(
    plan: Plan,
    model: nn.Module,
    *,
    budget: float,
    calibrate: Data | None = None,
    samples: int | None = None,
    progress: Progress | None = None,
) -> tuple[Plan, Tradeoff]:
    """Choose the architectures of the layers that ``plan`` replaces; gives the new plan, and the trade-off between weights and errors.

    Each layer, or all its parts of one size, gets one of ``named_candidates`` or stays dense. ``budget`` is the share of the dense
    layers' weights (without biases) to keep, and the sum of the squared errors is minimal within it. Errors are those of plain
    projections. With ``calibrate`` they are output errors of calibrated projections, weighted by ``calibration.sensitivities``, on
    samples that the candidates are not fitted to. The samples that ``apply`` holds out have no part in either. The model is only read.

    Cost: every candidate of every layer is projected, about nine projections for each one that ``apply`` makes.

    Raises:
        OptionError: a budget that is out of range, or that no choice keeps to.
        PlanError: the plan does not fit the model, or every layer would stay dense.
        DataError: fewer than three samples, or as ``apply`` does.
        ProjectionError, SurgeryError: as ``apply`` does.
    """
    allocation = prepare(plan, model, budget=budget, calibrate=calibrate, samples=samples, progress=progress)
    picks = allocation.pick(budget)
    return allocation.plan_of(picks), allocation.tradeoff(picks, budget)


def prepare(
    plan: Plan,
    model: nn.Module,
    *,
    budget: float | None = None,
    times: Sequence[TimedGroup] | None = None,
    calibrate: Data | None = None,
    samples: int | None = None,
    progress: Progress | None = None,
) -> "Allocation":
    """Compute all that ``allocate`` chooses from. With ``times``, milliseconds of groups of layers count in place of weights.

    A ``budget`` that is too small is refused at once, before the errors are computed. Raises what ``allocate`` raises.
    """
    check_calibration(calibrate, samples=samples)
    check_budget(budget, measured=times is not None, named=())
    dense = check_plan(plan, model)
    check_weights(dense, model)
    if times is not None and not any(group.faster for group in times):
        raise PlanError(f"nothing would be replaced: {_nearest(times)}")
    units = [unit for layer in plan.replaced for unit in _units(layer)] if times is None else _timed_units(plan, times)
    allocation = Allocation(plan, units, "weights" if times is None else "ms")
    if budget is not None and allocation.least > budget:
        raise OptionError(
            f"no choice of architectures keeps to a budget of {budget:g}: the smallest reachable share of the dense layers' "
            f"{allocation.unit} is {allocation.least:.4f}; give at least that"
        )
    seen = None if calibrate is None else look(plan, model, dense, calibrate, samples)
    units, reference = judge(units, dense, seen, progress)
    return replace(allocation, units=units, reference=reference, judged_on=None if seen is None else seen.judged_on)


@dataclass(frozen=True)
class Allocation:
    """The units of ``plan`` with the errors of their options. Costs are counted in ``unit``, "weights" or "ms".

    Squared errors are relative to ``reference``. ``judged_on`` counts the calibration samples that they are those on; None where there are
    none.
    """

    plan: Plan
    units: Sequence[Unit]
    unit: str
    reference: float = 0.0
    judged_on: int | None = None

    @cached_property
    def options(self) -> list[Sequence[Option]]:
        """For each unit its options, dense first."""
        return [unit.options for unit in self.units]

    @cached_property
    def whole(self) -> float:
        return cost_of(options[0] for options in self.options)

    @cached_property
    def least(self) -> float:
        """The smallest share of the dense costs that can be reached."""
        return cost_of(min(options, key=lambda option: option.cost) for options in self.options) / self.whole

    def pick(self, budget: float | None) -> Picks:
        """The options of least error within ``budget``; without one, for each unit the one of least error other than dense."""
        if budget is None:
            return tuple(min(options[1:], key=lambda option: option.error, default=options[0]) for options in self.options)
        picks = least_error(self.options, budget * self.whole)
        assert picks is not None  # a budget that is too small is refused before
        return picks

    def plan_of(self, picks: Picks, reasons: Mapping[int, Reason] | None = None) -> Plan:
        """The plan with the architectures picked; ``reasons`` say of units, by number, why they are dense.

        Raises:
            PlanError: every layer stays dense.
        """
        share = f"{cost_of(picks) / self.whole:.3f} of the {self.unit} in all"
        usual = Reason("budget", f"the budget is best kept with this layer dense, at a share of {share}")
        parts: dict[str, list[Part]] = {}
        kept: dict[str, Reason] = {}
        for number, (unit, option) in enumerate(zip(self.units, picks, strict=True)):
            reason = (reasons or {}).get(number) or unit.dense_reason or usual
            for (layer, of_layer), architecture in zip(unit.members, option.architectures, strict=True):
                parts.setdefault(layer.fqn, []).extend(replace(part, architecture=architecture) for part in of_layer)
                kept[layer.fqn] = reason
        replaced = {
            fqn: tuple(sorted(found, key=lambda part: part.start)) for fqn, found in parts.items() if any(p.architecture for p in found)
        }
        if not replaced:
            raise PlanError("nothing would be replaced: every layer does best dense; give a smaller budget")
        layers = tuple(replace(layer, parts=replaced.get(layer.fqn, layer.parts)) for layer in self.plan.layers)
        return replace(self.plan, layers=layers).keeping({fqn: reason for fqn, reason in kept.items() if fqn not in replaced})

    def tradeoff(self, picks: Picks, budget: float | None) -> Tradeoff:
        """The costs and errors of the best choices for any budget, and those of ``picks``, which were picked for ``budget``."""
        found = {layer.fqn: layer.family for layer in self.plan_of(picks).replaced}
        counts = Counter(found.get(layer.fqn) or DENSE for layer in self.plan.replaced)
        faster = f"the least error of what is faster than {DENSE}, group by group"
        return Tradeoff(
            unit=self.unit,
            chosen=self._point(picks),
            curve=_spread([self._point(each) for each in hull_points(self.options)]),
            judged_on=self.judged_on,
            goal=faster if budget is None else f"the least predicted error within {budget:.4g} of the dense {self.unit}",
            families=tuple(sorted(counts.items(), key=lambda each: (each[0] == DENSE, -each[1]))),
        )

    def _point(self, picks: Picks) -> Point:
        cost = cost_of(picks)
        return Point(cost, cost / self.whole, OutputError(sum(option.error for option in picks), self.reference).relative)


def named_candidates(out_features: int, in_features: int) -> dict[str, Architecture]:
    """Monarch of 2, 4, 8 and 16 blocks and gonon where they fit, then low rank with at most as many weights as each; all below dense.

    The names say what is alike in matrices of different sizes, such as "monarch 4" and "low rank as monarch 4".
    """
    found: dict[str, Architecture] = {}

    def add(name: str, make: Callable[..., Architecture], *options: int) -> None:
        with suppress(PatternError):
            architecture = make(out_features, in_features, *options)
            if architecture.density < 1:
                found[name] = architecture

    for nblocks in NBLOCKS:
        add(f"monarch {nblocks}", monarch, nblocks)
    add("gonon", gonon)
    if not found:  # a matrix whose sides have no common divisor can still be of low rank
        add("low rank", low_rank)
    for name, architecture in tuple(found.items()):
        rank = architecture.num_parameters // (out_features + in_features)
        if rank and name != "low rank":
            add(f"low rank as {name}", low_rank, rank)
    return found


def layer_candidates(layer: LayerPlan) -> dict[str, Architecture]:
    """Those of ``named_candidates`` that every part of a layer can take; none where its parts differ in size."""
    sizes = {part.stop - part.start for part in layer.parts}
    return named_candidates(sizes.pop(), layer.in_features) if len(sizes) == 1 else {}


def _units(layer: LayerPlan) -> list[Unit]:
    """One unit for all parts of one size."""
    units = []
    for size in dict.fromkeys(part.stop - part.start for part in layer.parts):
        parts = tuple(part for part in layer.parts if part.stop - part.start == size)
        options = [Option(DENSE, float(len(parts) * size * layer.in_features), (None,))]
        for name, architecture in named_candidates(size, layer.in_features).items():
            options.append(Option(name, float(len(parts) * architecture.num_parameters), (architecture,)))
        units.append(Unit(((layer, parts),), tuple(options)))
    return units


def _timed_units(plan: Plan, times: Sequence[TimedGroup]) -> list[Unit]:
    """One unit for each group, with those of its choices that are faster than dense."""
    layers = {layer.fqn: layer for layer in plan.replaced}
    units = []
    for group in times:
        options = tuple(Option(each.name, each.ms, each.architectures) for each in (group.dense, *group.faster))
        reason = Reason("slower", _nearest([group])) if len(options) == 1 else None
        units.append(Unit(tuple((layers[fqn], layers[fqn].parts) for fqn in group.fqns), options, reason))
    return units


def _nearest(times: Sequence[TimedGroup]) -> str:
    """How near the fastest choice of all groups comes to dense."""
    pairs = [(group, choice) for group in times for choice in group.choices[1:]]
    if not pairs:
        return "there is no choice but dense"
    group, choice = min(pairs, key=lambda pair: pair[1].ms / pair[0].dense.ms)
    where = f" for {' and '.join(group.fqns)}" if len(times) > 1 else ""
    margin = f"{choice.ms / group.dense.ms - 1:+.1%}, and less than {-group.noise:.1%} would count as faster"
    nearest = f"{choice.ms:.3g} ms beside {group.dense.ms:.3g} ms ({margin})"
    return f"nothing is faster than dense here; {choice.name} comes nearest{where}, {nearest}"


def _spread(curve: Sequence[Point]) -> tuple[Point, ...]:
    """A dozen points of the curve, its ends among them, at even distances of cost."""
    low, high = curve[0].cost, curve[-1].cost
    wanted = [low + (high - low) * step / (CURVE_POINTS - 1) for step in range(CURVE_POINTS)]
    return tuple(dict.fromkeys(min(curve, key=lambda point: abs(point.cost - cost)) for cost in wanted))


def cost_of(picks: Iterable[Option]) -> float:
    """The sum of the costs."""
    return sum(pick.cost for pick in picks)


def hull_points(units: Sequence[Sequence[Option]]) -> Iterator[Picks]:
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


def least_error(units: Sequence[Sequence[Option]], limit: float) -> Picks | None:
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


def _hull(unit: Sequence[Option]) -> list[Option]:
    """The choices on the lower convex hull, from the cheapest on, with errors that fall."""

    def is_above(first: Option, middle: Option, last: Option) -> bool:
        return (middle.error - first.error) * (last.cost - first.cost) >= (last.error - first.error) * (middle.cost - first.cost)

    hull: list[Option] = []
    for new in sorted(unit, key=lambda choice: (choice.cost, choice.error)):
        if hull and new.error >= hull[-1].error:
            continue
        while len(hull) > 1 and is_above(hull[-2], hull[-1], new):
            hull.pop()
        hull.append(new)
    return hull


def _improved(units: Sequence[Sequence[Option]], picks: Picks, limit: float) -> Picks:
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
