"""Put features that several layers share in an order that suits all of these layers: hidden units, heads, and entries of heads."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import sqrt

import torch
from torch import Tensor, nn

from flysurgery.calibration import Inputs, Samples
from flysurgery.patterns import Architecture
from flysurgery.projection import Features, Orders, Sharing, Side, choose_orders, metric_of
from flysurgery.surgery.plan import LayerPlan, Plan
from flysurgery.surgery.report import Permutation, PermutedLayer
from flysurgery.walker import HEADS, Member, Shared, Target, find_shared, separating, survey, targets_of

INDIFFERENT = "no order is better than another for products with one class of rows, as those of low rank"
SEPARATE = "its layers are not converted together: the names put them into different blocks"


def shared_features(plan: Plan, model: nn.Module, samples: Samples) -> tuple[Shared, ...]:
    """Find the features that layers replaced by ``plan`` share with each other and with dense layers, in the order of execution."""
    example = samples.inputs[:2].to(next(model.parameters()).dtype)
    seen = survey(model, example, prepare=separating(model))
    targets = targets_of(model, seen)
    known = {target.fqn: target for target in targets}
    layers = {layer.fqn: layer for layer in plan.layers}
    found = [_with_obstacles(each, known, layers) for each in find_shared(model, seen, targets)]
    return tuple(each for each in found if any(layers[fqn].is_replaced for fqn in each.linears if fqn in layers))


def permute(shared: Sequence[Shared], plan: Plan, model: nn.Module, stage: Sequence[LayerPlan], inputs: Mapping[str, Inputs]) -> "Permuted":
    """Choose the orders of the shared features of the layers of ``stage``, which are projected together.

    The model with all reordered linears computes what it did before.
    """
    permuted = Permuted(plan, model, inputs)
    names = {layer.fqn for layer in stage}
    waiting = {number: each for number, each in enumerate(shared) if permuted.replaced(each)[0] in names}
    while waiting:
        together = _apart(waiting)
        permuted.permute({number: each for number, each in together.items() if names.issuperset(permuted.replaced(each))})
        for number, each in together.items():
            permuted.outcomes.setdefault(number, Permutation(each.what, each.linears, tied={each.what: SEPARATE, **each.tied}))
            del waiting[number]
    return permuted


class Permuted:
    """The reordered linears of one stage by name, the inputs of all layers in their new orders, and the outcomes by number."""

    def __init__(self, plan: Plan, model: nn.Module, inputs: Mapping[str, Inputs]) -> None:
        self._layers = {layer.fqn: layer for layer in plan.layers}
        self._model = model
        self.inputs = dict(inputs)
        self.linears: dict[str, nn.Linear] = {}
        self.outcomes: dict[int, Permutation] = {}

    def replaced(self, shared: Shared) -> list[str]:
        return [fqn for fqn in shared.linears if fqn in self._layers and self._layers[fqn].is_replaced]

    def permute(self, together: Mapping[int, Shared]) -> None:
        """Reorder shared features that have no linear in common."""
        searches: dict[int, Sharing] = {}
        for number, shared in together.items():
            features = []
            for kind in shared.kinds:
                sides = tuple(side for member in kind.members for side in self._sides(member))
                features.append(Features(kind.members[0].size, sides, kind.free))
            if any(each.sides for each in features):
                searches[number] = Sharing(tuple(features), shared.groups, shared.swap_groups)
            else:
                self.outcomes[number] = Permutation(shared.what, shared.linears, tied=shared.tied or {shared.what: INDIFFERENT})
        for (number, search), found in zip(searches.items(), choose_orders(list(searches.values())), strict=True):
            shared = together[number]
            if found.lowers:
                for kind, order in zip(shared.kinds, found.orders, strict=True):
                    for member in kind.members:
                        self._reorder(member, order)
            self.outcomes[number] = Permutation(shared.what, shared.linears, self._layer_errors(search, found), found.lowers, shared.tied)

    def _linear(self, fqn: str) -> nn.Linear:
        linear = self.linears.get(fqn) or self._model.get_submodule(fqn)
        assert isinstance(linear, nn.Linear)  # members have no obstacle
        return linear

    def _sides(self, member: Member) -> list[Side]:
        """The products in which the member's features have a place that matters."""
        linear = self._linear(member.fqn)
        found = []
        for rows, architecture in _architectures(self._layers[member.fqn], member) or ():
            metric = metric_of(self.inputs[member.fqn].fit, bias=linear.bias is not None)
            side = Side(linear.weight.detach()[rows].to(metric.gram), architecture, metric.gram, member.columns, member.fqn)
            if side.classes.count > 1:  # where all places are alike, no order is better than another
                found.append(side)
        return found

    def _reorder(self, member: Member, order: Tensor) -> None:
        linear = self._linear(member.fqn)
        whole = torch.arange(linear.in_features if member.columns else linear.out_features)
        whole[member.start : member.stop] = member.start + order
        self.linears[member.fqn] = _reordered(linear, whole, columns=member.columns)
        given = self.inputs.get(member.fqn)
        if given is not None and member.columns:
            self.inputs[member.fqn] = Inputs(given.fit.permuted(whole), given.held_out.permuted(whole))

    def _layer_errors(self, search: Sharing, found: Orders) -> tuple[PermutedLayer, ...]:
        """For each layer the root of the mean square of its products' relative errors."""
        squares: dict[str, list[tuple[float, float]]] = {}
        for features, before, after in zip(search.features, found.before, found.after, strict=True):
            for side, old, new in zip(features.sides, before, after, strict=True):
                squares.setdefault(side.name, []).append((old, new))
        return tuple(
            PermutedLayer(fqn, self._layers[fqn].role, *(sqrt(sum(each) / len(each)) for each in zip(*pairs, strict=True)))
            for fqn, pairs in squares.items()
        )


def _apart(waiting: Mapping[int, Shared]) -> dict[int, Shared]:
    """The shared features that have no linear in common with any before them."""
    taken: set[str] = set()
    apart: dict[int, Shared] = {}
    for number, shared in waiting.items():
        if taken.isdisjoint(shared.linears):
            apart[number] = shared
        taken.update(shared.linears)
    return apart


def _reordered(linear: nn.Linear, order: Tensor, *, columns: bool) -> nn.Linear:
    """A copy with its rows and bias, or its columns, in another order."""
    new = nn.Linear(linear.in_features, linear.out_features, bias=linear.bias is not None, device="meta")
    for name, parameter in linear.named_parameters():
        value = parameter.detach()
        if not columns:
            value = value[order.to(value.device)]
        elif name == "weight":
            value = value[:, order.to(value.device)]
        setattr(new, name, nn.Parameter(value.clone(), requires_grad=parameter.requires_grad))
    return new.train(linear.training)


def _architectures(layer: LayerPlan, member: Member) -> tuple[tuple[slice, Architecture], ...] | None:
    """The rows and architectures of the products that have the member's features; empty for a dense layer, None if they can't be told
    apart."""
    if not layer.is_replaced:
        return ()
    whole = member.columns or (len(layer.parts) == 1 and member.size == layer.out_features)
    parts = [part for part in layer.parts if whole or (part.start, part.stop) == (member.start, member.stop)]
    found = tuple((slice(part.start, part.stop), part.architecture) for part in parts if part.architecture is not None)
    return found if parts and all(len(architecture) == 2 for _, architecture in found) else None


def _with_obstacles(shared: Shared, targets: Mapping[str, Target], layers: Mapping[str, LayerPlan]) -> Shared:
    """The shared features with what is tied because their layers cannot be reordered."""
    tied = dict(shared.tied)
    for order, members in shared.members.items():
        reason = _obstacle(members, targets, layers)
        if reason is not None:
            tied = {order: reason, **({HEADS: reason} if shared.what == HEADS else {})} | tied
    return replace(shared, tied=tied)


def _obstacle(members: Sequence[Member], targets: Mapping[str, Target], layers: Mapping[str, LayerPlan]) -> str | None:
    """Why the weights of the members cannot be reordered; None if they can."""
    for member in members:
        layer = layers.get(member.fqn)
        if layer is None or layer.conv or (not layer.is_replaced and targets[member.fqn].blocked):
            why = next((obstacle.text for obstacle in targets[member.fqn].obstacles if obstacle.blocking), "it is no nn.Linear of the plan")
            return f"the columns or rows of {member.fqn} stay as they are: {why}"
        if _architectures(layer, member) is None:
            return f"{member.fqn} becomes a product that does not have these features for itself, or one of other than two factors"
    return None
