"""Put features that several layers share in an order that suits all of these layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import sqrt

import torch
from torch import Tensor, nn

from flysurgery.projection import Features, Orders, Sharing, Side, choose_orders_together, metric_of
from flysurgery.surgery.permutable import Kind, Member, Shared, architectures
from flysurgery.surgery.plan import LayerPlan, Plan
from flysurgery.surgery.projecting import Inputs
from flysurgery.surgery.report import Permutation, PermutedLayer

INDIFFERENT = "no order is better than another for products with one class of rows, as those of low rank"
SEPARATE = "its layers are not converted together: the names put them into different blocks"


@dataclass
class Permuted:
    """Linears in the new orders with what they are given then, by name, aside from the model, and what came of each ``Shared``."""

    linears: dict[str, nn.Linear] = field(default_factory=dict)
    inputs: dict[str, Inputs] = field(default_factory=dict)
    outcomes: list[Permutation] = field(default_factory=list)


class Permuter:
    """Finds the orders of what the layers of a plan share, as far as they are projected together."""

    def __init__(self, plan: Plan, model: nn.Module, shared: Sequence[Shared]) -> None:
        self._layers = {layer.fqn: layer for layer in plan.layers}
        names = {member.fqn for each in shared for kind in each.kinds for member in kind.members}
        modules = {fqn: model.get_submodule(fqn) for fqn in names}
        self._linears = {fqn: module for fqn, module in modules.items() if isinstance(module, nn.Linear)}
        self._shared = shared

    def permute(self, stage: Sequence[LayerPlan], inputs: Mapping[str, Inputs]) -> Permuted:
        """The linears that are better off in another order, of the layers of ``stage`` and of those that stay dense.

        Each computes what it did before on inputs in their new order, and so does the model with all of them.
        """
        done = Permuted()
        names = {layer.fqn for layer in stage}
        waiting = {number: shared for number, shared in enumerate(self._shared) if self._replaced(shared)[0] in names}
        outcomes: dict[int, Permutation] = {}
        while waiting:
            outcomes |= self._permute(_apart(waiting), names, inputs, done)
            waiting = {number: shared for number, shared in waiting.items() if number not in outcomes}
        done.outcomes += [outcomes[number] for number in sorted(outcomes)]
        return done

    def _replaced(self, shared: Shared) -> list[str]:
        return [fqn for fqn in shared.linears if fqn in self._layers and self._layers[fqn].is_replaced]

    def _permute(
        self, together: Mapping[int, Shared], names: set[str], inputs: Mapping[str, Inputs], done: Permuted
    ) -> dict[int, Permutation]:
        """What comes of several that have no linear in common; ``names`` are the layers of the stage."""
        outcomes: dict[int, Permutation] = {}
        searches: dict[int, tuple[list[list[list[Side]]], Sharing]] = {}
        for number, shared in together.items():
            if not names.issuperset(self._replaced(shared)):
                outcomes[number] = Permutation(shared.what, shared.linears, tied={shared.what: SEPARATE, **shared.tied})
                continue
            sides = [[self._sides(member, inputs, done) for member in kind.members] for kind in shared.kinds]
            features = [
                Features(kind.members[0].size, tuple(side for of_member in found for side in of_member), kind.free)
                for kind, found in zip(shared.kinds, sides, strict=True)
            ]
            if any(each.sides for each in features):
                searches[number] = sides, Sharing(tuple(features), shared.groups, shared.swap_groups)
            else:
                outcomes[number] = Permutation(shared.what, shared.linears, tied=shared.tied or {shared.what: INDIFFERENT})
        chosen = choose_orders_together([sharing for _, sharing in searches.values()])
        for (number, (sides, _)), found in zip(searches.items(), chosen, strict=True):
            shared = together[number]
            if found.lowers:
                for kind, order in zip(shared.kinds, found.orders, strict=True):
                    for member in kind.members:
                        self._reorder(member, order, inputs, done)
            counts = [[len(of_member) for of_member in of_kind] for of_kind in sides]
            errors = self._layer_errors(shared.kinds, counts, found)
            outcomes[number] = Permutation(shared.what, shared.linears, errors, found.lowers, shared.tied)
        return outcomes

    def _sides(self, member: Member, inputs: Mapping[str, Inputs], done: Permuted) -> list[Side]:
        """The products in which the member's features have a place that matters."""
        linear = self._linears[member.fqn]
        found = []
        for rows, architecture in architectures(self._layers[member.fqn], member) or ():
            metric = metric_of(_given(member.fqn, inputs, done).fit, bias=linear.bias is not None)
            side = Side(linear.weight.detach()[rows].to(metric.gram), architecture, metric.gram, member.columns)
            found += [] if side.is_indifferent else [side]
        return found

    def _reorder(self, member: Member, order: Tensor, inputs: Mapping[str, Inputs], done: Permuted) -> None:
        linear = self._linears[member.fqn]
        whole = torch.arange(linear.in_features if member.columns else linear.out_features)
        whole[member.start : member.stop] = member.start + order
        new = _reordered(linear, columns=whole) if member.columns else _reordered(linear, rows=whole)
        self._linears[member.fqn] = done.linears[member.fqn] = new
        if member.fqn in inputs:
            given = _given(member.fqn, inputs, done)
            fit, held_out = (each.permuted(whole) if member.columns else each for each in (given.fit, given.held_out))
            done.inputs[member.fqn] = Inputs(fit, held_out, permuted=True)

    def _layer_errors(self, kinds: Sequence[Kind], counts: Sequence[Sequence[int]], found: Orders) -> tuple[PermutedLayer, ...]:
        """For each layer the root of the mean square of its products' relative errors."""
        squares: dict[str, list[tuple[float, float]]] = {}
        for kind, of_members, before, after in zip(kinds, counts, found.before, found.after, strict=True):
            names = [member.fqn for member, count in zip(kind.members, of_members, strict=True) for _ in range(count)]
            for name, old, new in zip(names, before, after, strict=True):
                squares.setdefault(name, []).append((old, new))
        return tuple(
            PermutedLayer(fqn, self._layers[fqn].role, *(sqrt(sum(each) / len(each)) for each in zip(*pairs, strict=True)))
            for fqn, pairs in squares.items()
        )


def _apart(waiting: Mapping[int, Shared]) -> dict[int, Shared]:
    """Those that have no linear in common with any before them."""
    taken: set[str] = set()
    apart: dict[int, Shared] = {}
    for number, shared in waiting.items():
        if taken.isdisjoint(shared.linears):
            apart[number] = shared
        taken.update(shared.linears)
    return apart


def _given(fqn: str, inputs: Mapping[str, Inputs], done: Permuted) -> Inputs:
    return done.inputs.get(fqn) or inputs[fqn]


def _reordered(linear: nn.Linear, *, rows: Tensor | None = None, columns: Tensor | None = None) -> nn.Linear:
    """A copy with its rows and bias, or its columns, in another order."""
    new = nn.Linear(linear.in_features, linear.out_features, bias=linear.bias is not None, device="meta")
    for name, parameter in linear.named_parameters():
        value = parameter.detach()
        if rows is not None:
            value = value[rows.to(value.device)]
        elif columns is not None and name == "weight":
            value = value[:, columns.to(value.device)]
        setattr(new, name, nn.Parameter(value.clone(), requires_grad=parameter.requires_grad))
    return new.train(linear.training)
