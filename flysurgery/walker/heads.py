"""Attentions whose heads, and the entries of their heads, may stand in another order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch.fx import Node

from flysurgery.walker.axes import product_of
from flysurgery.walker.dataflow import Attention
from flysurgery.walker.linears import Call
from flysurgery.walker.operations import PRODUCT_OF_MATRICES, is_fused_attention, name_of, shape_of
from flysurgery.walker.survey import Survey
from flysurgery.walker.target import Target
from flysurgery.walker.uniform import HEADS, ORDERS, VALUE, Projection, Uniform


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
    rows: tuple[Projection, ...] | None = None
    out: str | None = None


def find_heads(seen: Survey, targets: Sequence[Target]) -> tuple[Heads, ...]:
    """Every attention that reads linears, in the order of execution; ``targets`` are those of the same survey."""
    calls = {call.node: call for call in seen.calls}
    known = {target.fqn: target for target in targets}
    found: dict[tuple[str, ...], list[Attention]] = {}
    for attention in seen.dataflow.attentions:
        origins = [origin for _, operand in attention.operands for origin in seen.dataflow.flows[operand] if origin in calls]
        linears = tuple(dict.fromkeys(calls[origin].fqn for origin in origins))
        if linears:
            found.setdefault(linears, []).append(attention)
    readers = Counter(fqn for linears in found for fqn in linears)
    result = []
    for linears, attentions in found.items():
        if len(attentions) > 1 or any(readers[fqn] > 1 or known[fqn].calls > 1 for fqn in linears):
            result.append(_tied(linears, "its linears serve several attentions, or are called several times"))
        else:
            result.append(_judged(seen, known, calls, attentions[0], linears))
    return tuple(result)


def _judged(
    seen: Survey, targets: Mapping[str, Target], calls: Mapping[Node, Call], attention: Attention, linears: tuple[str, ...]
) -> Heads:
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
    proof = Uniform(seen.trace, seen.calls, (query, key, value), count)
    tied, out = dict(proof.tied), proof.out[0].fqn if len(proof.out) == 1 and proof.out[0].kind == "linear" else None
    if out is None or targets[out].calls > 1:
        reason = tied.get(VALUE, "its result does not go, entry by entry, into one linear alone")
        tied = {HEADS: reason, VALUE: reason, **tied}
    return Heads(linears, tied, count, (query, key, value), out)


def _tied(linears: tuple[str, ...], reason: str) -> Heads:
    return Heads(linears, dict.fromkeys(ORDERS, reason))


def _rows(seen: Survey, targets: Mapping[str, Target], calls: Mapping[Node, Call], attention: Attention, name: str) -> Projection | None:
    """The rows of the one linear that an operand comes from."""
    operands = [operand for role, operand in attention.operands if role == name]
    origins = [origin for operand in operands for origin in seen.dataflow.flows[operand]]
    if len(operands) != 1 or len(origins) != 1 or origins[0] not in calls or calls[origins[0]].kind != "linear":
        return None
    call = calls[origins[0]]
    split = targets[call.fqn].split
    if split is not None:
        return next((Projection(call, each.start, each.stop) for each in split if each.name == name), None)
    shared = [role for role, operand in attention.operands if call.node in seen.dataflow.flows[operand]]
    return Projection(call, 0, call.out_features) if shared == [name] else None


def _entries(attention: Attention) -> int | None:
    """The number of entries that query and key have in each head."""
    if is_fused_attention(name_of(attention.output)):
        shape = shape_of(next(operand for role, operand in attention.operands if role == "q"))
        return None if shape is None else shape[-1]
    products = [product_of(node) for node in attention.scores if name_of(node) in PRODUCT_OF_MATRICES]
    product = products[0] if len(products) == 1 else None
    if product is None or len(product.letters.summed) != 1:
        return None
    shape = shape_of(product.operands[0])
    return None if shape is None else shape[product.letters.left.index(product.letters.summed[0])]
