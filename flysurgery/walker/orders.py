"""Features that several linears share, and that may stand in another order: found by dataflow, and tried on the model.

Hidden units, whole heads, and the entries of each head have an order that two or three linears agree on. Whether the model computes the
same in another one is seen by putting them into another one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.fx import Node
from torch.utils import _pytree as pytree

from flysurgery.errors import WalkError
from flysurgery.walker.attention import separating
from flysurgery.walker.dataflow import Attention
from flysurgery.walker.linears import Call
from flysurgery.walker.operations import einsum_letters, is_fused_attention, name_of, shape_of
from flysurgery.walker.survey import Survey
from flysurgery.walker.target import Target
from flysurgery.walker.trace import isolated, one_line, shadow

HEADS, QUERY_KEY, VALUE = "heads", "query and key", "value"
ORDERS = (HEADS, QUERY_KEY, VALUE)
"""What may be in another order: whole heads; entries of query and key within a head; entries of value within a head."""

SAME = 1e-8
"""Outputs in float64 that differ by at most this share of the largest entry are the same. Larger than rounding, for parts in float32."""


@dataclass(frozen=True)
class Rows:
    """Rows ``start`` to ``stop`` of a linear's weight: all heads of query, key or value, one after the other."""

    fqn: str
    start: int
    stop: int

    @property
    def size(self) -> int:
        """The number of rows."""
        return self.stop - self.start


@dataclass(frozen=True)
class Heads:
    """One attention of ``count`` heads, and in which orders these may stand so that the model computes the same.

    ``tied`` has a reason for each of ``ORDERS`` that must stay: "heads", whole heads, in the rows of query, key and value and the
    columns of the linear ``out``; "query and key", their entries within each head, in one order for both; "value", the entries of value
    within each head, with the columns of ``out``. ``rows`` are those of query, key and value, and missing where they are not known;
    ``out`` is missing where heads and value are tied. ``linears`` are the names of all linears that the attention reads.
    """

    linears: tuple[str, ...]
    tied: Mapping[str, str]
    count: int = 1
    rows: tuple[Rows, Rows, Rows] | None = None
    out: str | None = None


Move: TypeAlias = tuple[str, int, int, Tensor]
"""A linear's name, 0 for rows or 1 for columns of its weight, where the features start, and the order that they get."""


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
        named = (*self._double.named_parameters(remove_duplicate=False), *self._double.named_buffers(remove_duplicate=False))
        wide: dict[int, Tensor] = {id(tensor): _wide(tensor.detach()) for _, tensor in named}
        self._tensors = {name: wide[id(tensor)] for name, tensor in named}
        self._example = pytree.tree_map_only(Tensor, _wide, example)
        try:
            self._usual = self._outputs(self._tensors)
        except Exception as error:  # whatever the forward raises
            raise WalkError(f"{type(model).__name__} cannot be tried with features in another order: {one_line(error)}") from error
        if not self._usual or not all(bool(output.isfinite().all()) for output in self._usual):
            raise WalkError(f"{type(model).__name__} cannot be tried with features in another order: it gives no finite outputs")

    def changing(self, questions: Sequence[Sequence[Move]]) -> set[int]:
        """The positions of those ``questions`` whose moves, all together, change the output."""
        if not questions or self._is_same([move for moves in questions for move in moves]):
            return set()
        if len(questions) == 1:
            return {0}
        return {number for number, moves in enumerate(questions) if not self._is_same(moves)}

    def _is_same(self, moves: Sequence[Move]) -> bool:
        tensors = dict(self._tensors)
        for fqn, axis, start, order in moves:
            for name in ("weight", "bias") if axis == 0 else ("weight",):
                tensor = tensors.get(f"{fqn}.{name}")
                if tensor is not None:
                    whole = torch.arange(tensor.shape[axis])
                    whole[start : start + len(order)] = start + order
                    tensors[f"{fqn}.{name}"] = tensor.index_select(axis, whole.to(tensor.device))
        found = zip(self._outputs(tensors), self._usual, strict=True)
        return all(new.shape == old.shape and bool((new - old).abs().max() <= SAME * old.abs().max()) for new, old in found)

    def _outputs(self, tensors: Mapping[str, Tensor]) -> list[Tensor]:
        with isolated(self._double):
            result = functional_call(self._double, dict(tensors), self._example)
        return [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.numel()]


def _wide(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


def find_pairs(seen: Survey, trial: Trial) -> tuple[tuple[str, str], ...]:
    """The names of each two linears whose hidden units, rows of the first and columns of the second, may stand in any order."""
    calls = {call.node: call for call in seen.calls if call.kind == "linear"}
    times = Counter(call.fqn for call in seen.calls)
    met: dict[tuple[str, str], int] = Counter()
    for call in calls.values():
        origins = list(seen.dataflow.flows[call.source])
        first = calls.get(origins[0]) if len(origins) == 1 else None
        if first is not None and first.out_features == call.in_features and first.fqn != call.fqn:
            met[first.fqn, call.fqn] += 1
    readers = Counter(first for first, _ in met)
    pairs = [pair for pair, count in met.items() if times[pair[0]] == times[pair[1]] == count and readers[pair[0]] == 1]
    sizes = {call.fqn: call.out_features for call in calls.values()}
    orders = [_entries_moved(sizes[first], 1) for first, _ in pairs]
    moves = [((first, 0, 0, order), (second, 1, 0, order)) for (first, second), order in zip(pairs, orders, strict=True)]
    changing = trial.changing(moves)
    return tuple(pair for number, pair in enumerate(pairs) if number not in changing)


def find_heads(seen: Survey, targets: Sequence[Target], trial: Trial) -> tuple[Heads, ...]:
    """Every attention that reads linears, in the order of execution; ``targets`` are those of the same survey."""
    calls = {call.node: call for call in seen.calls}
    known = {target.fqn: target for target in targets}
    met: dict[tuple[str, ...], list[Attention]] = {}
    for attention in seen.dataflow.attentions:
        origins = [origin for _, operand in attention.operands for origin in seen.dataflow.flows[operand] if origin in calls]
        linears = tuple(dict.fromkeys(calls[origin].fqn for origin in origins))
        if linears:
            met.setdefault(linears, []).append(attention)
    readers = Counter(fqn for linears in met for fqn in linears)
    found = []
    for linears, attentions in met.items():
        if len(attentions) > 1 or any(readers[fqn] > 1 or known[fqn].calls > 1 for fqn in linears):
            found.append(_tied(linears, "its linears serve several attentions, or are called several times"))
        else:
            found.append(_heads(seen, known, calls, attentions[0], linears))
    for order in ORDERS:
        asked = [number for number, heads in enumerate(found) if order not in heads.tied]
        for position in trial.changing([_moves(found[number], order) for number in asked]):
            heads = found[asked[position]]
            what = "the heads" if order == HEADS else f"the entries of {order} within each head"
            found[asked[position]] = replace(heads, tied={**heads.tied, order: f"the model's output depends on the order of {what}"})
    return tuple(found)


def _heads(
    seen: Survey, targets: Mapping[str, Target], calls: Mapping[Node, Call], attention: Attention, linears: tuple[str, ...]
) -> Heads:
    """The heads of an attention, with no more tied than what cannot be tried."""
    query, key, value = (_rows(seen, targets, calls, attention, name) for name in ("q", "k", "v"))
    size = _entries(attention)
    if query is None or key is None or value is None:
        return _tied(linears, "the graph does not prove which rows of which linear are its query, key and value")
    if size is None:
        return _tied(linears, "it is no softmax of query times key, times value")
    count = query.size // size
    if query.size % size:
        return _tied(linears, "its scores are no sums over the entries of a head")
    if query.size != key.size or value.size % count:
        return _tied(linears, "heads share keys and values, so that there are fewer of these than of queries")
    readers = [call for call in seen.calls if attention.output in seen.dataflow.flows[call.source]]
    if len(readers) == 1 and readers[0].kind == "linear" and readers[0].in_features == value.size and targets[readers[0].fqn].calls == 1:
        return Heads(linears, {}, count, (query, key, value), readers[0].fqn)
    reason = "its result does not go into one linear alone"
    return Heads(linears, {HEADS: reason, VALUE: reason}, count, (query, key, value))


def _tied(linears: tuple[str, ...], reason: str) -> Heads:
    return Heads(linears, dict.fromkeys(ORDERS, reason))


def _rows(seen: Survey, targets: Mapping[str, Target], calls: Mapping[Node, Call], attention: Attention, name: str) -> Rows | None:
    """The rows of the one linear that an operand comes from."""
    operands = [operand for role, operand in attention.operands if role == name]
    origins = [origin for operand in operands for origin in seen.dataflow.flows[operand]]
    if len(operands) != 1 or len(origins) != 1 or origins[0] not in calls or calls[origins[0]].kind != "linear":
        return None
    call = calls[origins[0]]
    split = targets[call.fqn].split
    if split is not None:
        return next((Rows(call.fqn, each.start, each.stop) for each in split if each.name == name), None)
    shared = [role for role, operand in attention.operands if call.node in seen.dataflow.flows[operand]]
    return Rows(call.fqn, 0, call.out_features) if shared == [name] else None


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


def _moves(heads: Heads, order: str) -> list[Move]:
    """What puts the heads into another order, or the entries within each."""
    assert heads.rows is not None  # else all is tied
    query, key, value = heads.rows
    read = [] if heads.out is None else [(heads.out, 1, 0, value.size)]
    members = [] if order == VALUE else [(each.fqn, 0, each.start, each.size) for each in (query, key)]
    members += [] if order == QUERY_KEY else [(value.fqn, 0, value.start, value.size), *read]
    moved = _heads_moved if order == HEADS else _entries_moved
    return [(fqn, axis, start, moved(size, heads.count)) for fqn, axis, start, size in members]


def _heads_moved(size: int, count: int) -> Tensor:
    return torch.arange(size).reshape(count, -1).roll(1, 0).flatten()


def _entries_moved(size: int, count: int) -> Tensor:
    """Another order of the entries in each of ``count`` groups."""
    orders = [torch.randperm(size // count, generator=torch.Generator().manual_seed(number)) for number in range(count)]
    return torch.cat([number * (size // count) + order for number, order in enumerate(orders)])
