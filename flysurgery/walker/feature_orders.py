"""Hidden units, whole heads and the entries of each head have an order that several linears agree on: found by dataflow, and tried.

Whether the model computes the same in another order is seen by putting them into another one.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils import _pytree as pytree

from flysurgery.errors import WalkError, raised_as
from flysurgery.walker.attention import separating
from flysurgery.walker.dataflow import Attention
from flysurgery.walker.linears import Target
from flysurgery.walker.operations import einsum_letters, is_fused_attention, name_of, shape_of
from flysurgery.walker.trace import isolated, shadow
from flysurgery.walker.walk import Survey

HIDDEN_UNITS, HEADS, QUERY_KEY, VALUE = "hidden units", "heads", "query and key", "value"
"""What may be in another order: hidden units; whole heads; entries of query and key within a head; entries of value within a head."""

SAME = 1e-8
"""Outputs in float64 that differ by at most this share of the largest entry are the same. Larger than rounding, for parts in float32."""


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
    """Members that get the same order. ``free``: features may change places within their group, not only together with it."""

    members: tuple[Member, ...]
    free: bool = True


@dataclass(frozen=True)
class Shared:
    """Features that several linears share, and in which orders these may stand so that the model computes the same.

    ``what`` is ``HIDDEN_UNITS``, rows of one linear and columns of the only one that reads them, or ``HEADS``, one attention of ``groups``
    heads. ``linears`` are those that the attention reads, and the one after it if that is known. ``members`` get one order each: all hidden
    units; entries of query and key within each head; those of value, with the columns of what reads them. ``tied``: why others must stay.
    """

    what: str
    linears: tuple[str, ...]
    members: Mapping[str, tuple[Member, ...]] = field(default_factory=dict)
    groups: int = 1
    tied: Mapping[str, str] = field(default_factory=dict)

    @property
    def swap_groups(self) -> bool:
        """Whether whole heads may change places."""
        return self.what == HEADS and HEADS not in self.tied

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """What moves, alone or with its head."""
        found = (Kind(members, order not in self.tied) for order, members in self.members.items())
        return tuple(kind for kind in found if kind.free or self.swap_groups)


Moves: TypeAlias = list[tuple[Member, Tensor]]
"""Some features of linears, and the order that each gets."""


class Trial:
    """Runs a stand-in of a model, in float64 and eval mode, with features in another order. The model stays as it is.

    ``example`` are inputs of the forward with values that occur: of zeros nothing can be learned. Holds a copy of the weights. Each
    question costs a forward, and one for each of several that are asked together where their answers differ.

    Raises:
        WalkError: the model does not run in float64, or gives no finite numbers.
    """

    def __init__(self, model: nn.Module, example: tuple[Any, ...]) -> None:
        self._double = shadow(model)
        separating(model)(self._double)
        named = (*self._double.named_parameters(), *self._double.named_buffers())
        self._tensors = {name: _wide(tensor.detach()) for name, tensor in named}
        self._example = pytree.tree_map_only(Tensor, _wide, example)
        refusal = f"{type(model).__name__} cannot be tried with features in another order"
        with raised_as(WalkError, refusal):
            self._usual = self._outputs(self._tensors)
        if not self._usual or not all(bool(output.isfinite().all()) for output in self._usual):
            raise WalkError(f"{refusal}: it gives no finite outputs")

    def changing(self, questions: Sequence[Moves]) -> set[int]:
        """The positions of those ``questions`` whose moves, all together, change the output."""
        if not questions or self._is_same([move for moves in questions for move in moves]):
            return set()
        return {number for number, moves in enumerate(questions) if len(questions) == 1 or not self._is_same(moves)}

    def _is_same(self, moves: Moves) -> bool:
        tensors = dict(self._tensors)
        for member, order in moves:
            if f"{member.fqn}.weight" not in tensors:  # it is computed, or has the name of another module that holds it
                return False
            axis = int(member.columns)
            for name in (f"{member.fqn}.weight", f"{member.fqn}.bias")[: 2 - axis]:
                tensor = tensors.get(name)
                if tensor is not None:
                    whole = torch.arange(tensor.shape[axis])
                    whole[member.start : member.stop] = member.start + order
                    tensors[name] = tensor.index_select(axis, whole.to(tensor.device))
        found = zip(self._outputs(tensors), self._usual, strict=True)
        return all(new.shape == old.shape and bool((new - old).abs().max() <= SAME * old.abs().max()) for new, old in found)

    def _outputs(self, tensors: Mapping[str, Tensor]) -> list[Tensor]:
        with isolated(self._double):
            result = functional_call(self._double, dict(tensors), self._example)
        return [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.numel()]


def _wide(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


def find_shared(model: nn.Module, seen: Survey, targets: Sequence[Target]) -> tuple[Shared, ...]:
    """Hidden units that may stand in any order, and every attention that reads linears, each in the order of execution.

    ``seen`` is a survey of ``model`` on inputs that occur, and ``targets`` are those of the same survey.

    Raises:
        WalkError: as ``Trial``.
    """
    trial = Trial(model, seen.example)
    hidden = _hidden_units(seen)
    changing = trial.changing([_moves(each, HIDDEN_UNITS) for each in hidden])
    found = _attentions(seen, targets)
    for order, what in ((HEADS, "the heads"), (QUERY_KEY, "the entries of query and key"), (VALUE, "the entries of value")):
        asked = [number for number, each in enumerate(found) if order not in each.tied]
        for position in trial.changing([_moves(found[number], order) for number in asked]):
            number = asked[position]
            reason = f"the model's output depends on the order of {what}"
            found[number] = replace(found[number], tied={**found[number].tied, order: reason})
    return (*(each for number, each in enumerate(hidden) if number not in changing), *found)


def _moves(shared: Shared, order: str) -> Moves:
    """What puts the heads into another order, or the features of one kind within each group."""
    if order == HEADS:
        members = [member for of_kind in shared.members.values() for member in of_kind]
        return [(each, torch.arange(each.size).reshape(shared.groups, -1).roll(1, 0).flatten()) for each in members]
    moves = []
    for member in shared.members[order]:
        length = member.size // shared.groups
        orders = [torch.randperm(length, generator=torch.Generator().manual_seed(number)) for number in range(shared.groups)]
        moves.append((member, torch.cat([number * length + each for number, each in enumerate(orders)])))
    return moves


def _hidden_units(seen: Survey) -> list[Shared]:
    """Rows of a linear, and columns of the only linear that reads them, where that reads nothing else."""
    calls = {node: call for node, call in seen.dataflow.calls.items() if call.kind == "linear"}
    times = Counter(call.fqn for call in seen.calls)
    met: Counter[tuple[str, str, int]] = Counter()
    for call in calls.values():
        origins = list(seen.dataflow.flows[call.source])
        first = calls.get(origins[0]) if len(origins) == 1 else None
        if first is not None and first.out_features == call.in_features and first.fqn != call.fqn:
            met[first.fqn, call.fqn, call.in_features] += 1
    readers = Counter(first for first, _, _ in met)
    return [
        Shared(HIDDEN_UNITS, (first, second), {HIDDEN_UNITS: (Member(first, 0, size), Member(second, 0, size, columns=True))})
        for (first, second, size), count in met.items()
        if times[first] == times[second] == count and readers[first] == 1
    ]


def _attentions(seen: Survey, targets: Sequence[Target]) -> list[Shared]:
    calls = seen.dataflow.calls
    known = {target.fqn: target for target in targets}
    met: dict[tuple[str, ...], list[Attention]] = {}
    for attention in seen.dataflow.attentions.values():
        origins = [origin for _, operand in attention.operands for origin in seen.dataflow.flows[operand] if origin in calls]
        linears = tuple(dict.fromkeys(calls[origin].fqn for origin in origins))
        if linears:
            met.setdefault(linears, []).append(attention)
    readers = Counter(fqn for linears in met for fqn in linears)
    found = []
    for linears, attentions in met.items():
        if len(attentions) > 1 or any(readers[fqn] > 1 or known[fqn].calls > 1 for fqn in linears):
            heads = "its linears serve several attentions, or are called several times"
        else:
            heads = _heads(seen, known, attentions[0], linears)
        found.append(Shared(HEADS, linears, tied=dict.fromkeys((HEADS, QUERY_KEY, VALUE), heads)) if isinstance(heads, str) else heads)
    return found


def _heads(seen: Survey, targets: Mapping[str, Target], attention: Attention, linears: tuple[str, ...]) -> Shared | str:
    """The heads of an attention, with no more tied than what cannot be tried; or the reason why all of it is tied."""
    query, key, value = (_rows(seen, targets, attention, name) for name in ("q", "k", "v"))
    size = _entries(attention)
    if query is None or key is None or value is None:
        return "the graph does not prove which rows of which linear are its query, key and value"
    if size is None:
        return "it is no softmax of query times key, times value"
    count = query.size // size
    if query.size % size:
        return "its scores are no sums over the entries of a head"
    if query.size != key.size or value.size % count:
        return "heads share keys and values, so that there are fewer of these than of queries"
    readers = [call for call in seen.calls if attention.output in seen.dataflow.flows[call.source]]
    if len(readers) == 1 and readers[0].kind == "linear" and readers[0].in_features == value.size and targets[readers[0].fqn].calls == 1:
        out = readers[0].fqn
        members = {QUERY_KEY: (query, key), VALUE: (value, Member(out, 0, value.size, columns=True))}
        return Shared(HEADS, (*linears, out), members, count)
    reason = "its result does not go into one linear alone"
    return Shared(HEADS, linears, {QUERY_KEY: (query, key), VALUE: (value,)}, count, {HEADS: reason, VALUE: reason})


def _rows(seen: Survey, targets: Mapping[str, Target], attention: Attention, name: str) -> Member | None:
    """The rows of the one linear that an operand comes from."""
    operands = [operand for role, operand in attention.operands if role == name]
    origins = [origin for operand in operands for origin in seen.dataflow.flows[operand]]
    call = seen.dataflow.calls.get(origins[0]) if len(operands) == len(origins) == 1 else None
    if call is None or call.kind != "linear":
        return None
    split = targets[call.fqn].split
    if split is not None:
        return next((Member(call.fqn, each.start, each.stop) for each in split if each.name == name), None)
    shared = [role for role, operand in attention.operands if call.node in seen.dataflow.flows[operand]]
    return Member(call.fqn, 0, call.out_features) if shared == [name] else None


def _entries(attention: Attention) -> int | None:
    """The number of entries that query and key have in each head."""
    if is_fused_attention(name_of(attention.output)):
        shape = shape_of(next(operand for role, operand in attention.operands if role == "q"))
        return None if shape is None else shape[-1]
    products = [node for node in attention.scores if name_of(node) in ("einsum", "matmul", "bmm")]
    if len(products) != 1:
        return None
    node = products[0]
    left, axis = node.all_input_nodes[0], -1
    if name_of(node) == "einsum":
        letters, result = einsum_letters(node)
        summed = [letter for letter in letters[0] if letter not in result]
        if len(summed) != 1:
            return None
        axis = letters[0].index(summed[0])
    shape = shape_of(left)
    return None if shape is None else shape[axis]
