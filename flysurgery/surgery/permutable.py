"""Which features of a plan's layers may stand in another order: hidden units of feed-forward blocks, heads, and entries of heads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from flysurgery.calibration import Samples
from flysurgery.patterns import Architecture
from flysurgery.surgery.plan import LayerPlan, Plan
from flysurgery.walker import HEADS, QUERY_KEY, VALUE, Heads, Target, find_heads, survey, targets_of

HIDDEN_UNITS = "hidden units"


@dataclass(frozen=True)
class Member:
    """Rows ``start`` to ``stop`` of a linear's weight, or columns."""

    fqn: str
    start: int
    stop: int
    columns: bool = False

    @property
    def size(self) -> int:
        """The number of features."""
        return self.stop - self.start


@dataclass(frozen=True)
class Kind:
    """Members that one order is for; ``free``: the features of a group may change places within it, else they only go with it."""

    members: tuple[Member, ...]
    free: bool = True


@dataclass(frozen=True)
class Shared:
    """Features that several linears share and that stand in ``groups``, for ``swap_groups`` in any order; ``what`` names them.

    ``tied`` says of what may not move why; nothing moves where there are no ``kinds``.
    """

    what: str
    linears: tuple[str, ...]
    kinds: tuple[Kind, ...]
    groups: int
    swap_groups: bool
    tied: Mapping[str, str]


def shared_features(plan: Plan, model: nn.Module, samples: Samples) -> tuple[Shared, ...]:
    """What the layers that ``plan`` replaces share with each other and with layers that stay dense, in the order of execution."""
    seen = survey(model, samples.inputs[:2])
    targets = targets_of(model, seen)
    known = {target.fqn: target for target in targets}
    layers = {layer.fqn: layer for layer in plan.layers}
    found = [_hidden_units(target, known, layers) for target in targets if target.pair is not None]
    found += [_heads(heads, known, layers) for heads in find_heads(seen, targets)]
    return tuple(each for each in found if any(layers[fqn].is_replaced for fqn in each.linears if fqn in layers))


def architectures(layer: LayerPlan, member: Member) -> tuple[tuple[slice, Architecture], ...] | None:
    """The rows of each product in which the member's features are; none where it stays dense. None where they can't be told apart."""
    if not layer.is_replaced:
        return ()
    whole = member.columns or (len(layer.parts) == 1 and member.size == layer.out_features)
    parts = [part for part in layer.parts if whole or (part.start, part.stop) == (member.start, member.stop)]
    found = tuple((slice(part.start, part.stop), part.architecture) for part in parts if part.architecture is not None)
    return found if parts and all(len(architecture) == 2 for _, architecture in found) else None


def _hidden_units(first: Target, targets: Mapping[str, Target], layers: Mapping[str, LayerPlan]) -> Shared:
    second = targets[first.pair or ""]
    kind = Kind((Member(first.fqn, 0, first.out_features), Member(second.fqn, 0, second.in_features, columns=True)))
    reason = _obstacle(kind, targets, layers)
    tied = {} if reason is None else {HIDDEN_UNITS: reason}
    return Shared(HIDDEN_UNITS, (first.fqn, second.fqn), () if tied else (kind,), 1, False, tied)


def _heads(heads: Heads, targets: Mapping[str, Target], layers: Mapping[str, LayerPlan]) -> Shared:
    linears = heads.linears if heads.out is None else (*heads.linears, heads.out)
    tied = dict(heads.tied)
    if heads.rows is None:
        return Shared(HEADS, linears, (), heads.count, False, tied)
    query, key, value = (Member(each.fqn, each.start, each.stop) for each in heads.rows)
    read = (Member(heads.out, 0, value.size, columns=True),) if heads.out else ()
    members = {QUERY_KEY: (query, key), VALUE: (value, *read)}
    for order, of_order in members.items():
        reason = _obstacle(Kind(of_order), targets, layers)
        if reason is not None:
            tied = {order: reason, HEADS: reason} | tied
    swap = HEADS not in tied
    kinds = tuple(Kind(of_order, order not in tied) for order, of_order in members.items() if swap or order not in tied)
    return Shared(HEADS, linears, kinds, heads.count, swap, tied)


def _obstacle(kind: Kind, targets: Mapping[str, Target], layers: Mapping[str, LayerPlan]) -> str | None:
    """Why the weights of the members cannot be reordered, or why that cannot be judged."""
    for member in kind.members:
        layer = layers.get(member.fqn)
        if layer is None or layer.conv or (not layer.is_replaced and targets[member.fqn].blocked):
            why = next((obstacle.text for obstacle in targets[member.fqn].obstacles if obstacle.blocking), "it is no nn.Linear of the plan")
            return f"the columns or rows of {member.fqn} stay as they are: {why}"
        if architectures(layer, member) is None:
            return f"{member.fqn} becomes a product that does not have these features for itself, or one of other than two factors"
    return None
