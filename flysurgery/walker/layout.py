"""Proof of a fused projection's layout: which rows of its weight become query, key, value (or feed-forward) entries.

Every entry of the linear's output carries the interval of the weight rows that it can depend on: at the linear itself, output
feature r carries [r, r]. Operators that move entries move the intervals; elementwise ones take the hull over their operands; any
other operator is taken to mix everything, so that each entry of its result carries the hull of all that entered. The hull at the
query of attention therefore holds every row that can reach it. Where the hulls of query, key and value neither overlap nor leave a
row out, each is exactly the range of its rows; where heads are interleaved the hulls overlap, and nothing is proven.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Node
from torch.utils import _pytree as pytree

from flysurgery.walker import operations as ops
from flysurgery.walker.dataflow import Dataflow, Via
from flysurgery.walker.linears import Call, Slice

_NOTHING = (torch.iinfo(torch.int32).max, -1)  # the empty interval: lowest above highest


class _Rows(NamedTuple):
    """Intervals of weight rows: tensors (or tuples of tensors) of the value's shape."""

    lowest: Any
    highest: Any


def split_of(call: Call, dataflow: Dataflow) -> tuple[Slice, ...] | None:
    """Row ranges of ``call`` in ascending order, or None where they are not proven or all rows serve alike.

    Those are ``"ffn"`` that make ``call`` the first linear of a feed-forward block as well.
    """
    flows, shape = dataflow.flows, ops.shape_of(call.node)
    sinks = [(name, node) for each in dataflow.attentions.values() for name, node in each.operands if call.node in flows[node]]
    sinks += [("ffn", other.source) for other in dataflow.calls.values() if flows[other.source].get(call.node, Via()).nonlinear]
    path = _path(call.node, {node for _, node in sinks}, dataflow)
    if path is None or len({name for name, _ in sinks}) < 2 or shape is None or call.kind == "conv":
        return None
    if not all(ops.is_static(ops.value_of(node)) for node in path):
        return None
    rows = torch.arange(call.out_features, dtype=torch.int32, device="cpu").expand(shape)
    known: dict[Node, _Rows] = {call.node: _Rows(rows, rows)}
    for node in path:
        known[node] = _step(node, known)
    hulls: dict[str, tuple[int, int]] = {}
    for name, node in sinks:
        low, high = _hull([known[node]])
        before = hulls.get(name, (low, high))
        hulls[name] = (min(low, before[0]), max(high, before[1]))
    return _tiling(hulls, call.out_features)


def _path(start: Node, sinks: set[Node], dataflow: Dataflow) -> list[Node] | None:
    """The nodes between the linear and the sinks, in the order of execution; None where tensors are written in place on the way."""
    after = ops.reached([start], lambda node: [user for user in node.users if start in dataflow.flows.get(user, {})])
    if not sinks <= after or any(_writes_elsewhere(node, after) for node in after):
        return None
    needed = ops.reached(sinks, lambda node: [arg for arg in node.all_input_nodes if arg in after])
    return [node for node in start.graph.nodes if node in needed and node is not start]


def _writes_elsewhere(node: Node, reached: set[Node]) -> bool:
    """Whether a node changes a tensor in place otherwise than entry by entry (adding a bias, scaling)."""
    sources = [arg for arg in node.all_input_nodes if arg in reached]
    return ops.is_in_place(node) and (ops.name_of(node) not in ops.POINTWISE | ops.IDENTITY or len(sources) > 1)


def _tiling(hulls: dict[str, tuple[int, int]], out_features: int) -> tuple[Slice, ...] | None:
    """Slices, if the hulls tile the rows; hulls that coincide become one slice of a joint name."""
    names: dict[tuple[int, int], list[str]] = {}
    for name, hull in hulls.items():
        names.setdefault(hull, []).append(name)
    slices = [Slice("_".join(sorted(names[low, high])), low, high + 1) for low, high in sorted(names)]
    starts, stops = [s.start for s in slices], [s.stop for s in slices]
    return tuple(slices) if len(slices) > 1 and [*starts, out_features] == [0, *stops] else None


def _step(node: Node, known: dict[Node, _Rows]) -> _Rows:
    """The intervals of a node's result."""
    name = ops.name_of(node)
    sources = [known[arg] for arg in node.all_input_nodes if arg in known]
    if name in ops.IDENTITY and len(sources) == 1:
        return sources[0]
    indexed = any(ops.is_discrete(arg) for arg in node.all_input_nodes)  # by numbers that are not known here
    if name in ops.SHAPE and not indexed:
        exact = all(rows.lowest is rows.highest for rows in sources) and all(arg in known for arg in node.all_input_nodes)
        lowest = _moved(node, known, 0)
        return _Rows(lowest, lowest if exact else _moved(node, known, 1))
    shape = ops.shape_of(node)
    if name in ops.POINTWISE and shape is not None:
        if len(sources) == 1 and tuple(sources[0].lowest.shape) == shape:
            return sources[0]
        lowest, highest = sources[0]
        for other in sources[1:]:
            lowest = torch.minimum(_compact(lowest), _compact(other.lowest))
            highest = torch.maximum(_compact(highest), _compact(other.highest))
        return _Rows(lowest.expand(shape), highest.expand(shape))
    return _Rows(*(_constant(ops.value_of(node), end) for end in _hull(sources)))


def _moved(node: Node, known: dict[Node, _Rows], end: int) -> Any:
    """Run an operator that moves entries on one end of the intervals; what does not come from the linear carries the empty interval."""
    strided = ops.name_of(node) in ops.STRIDED

    def argument(arg: Node) -> Any:
        found = known[arg][end] if arg in known else _constant(ops.value_of(arg), _NOTHING[end])
        # a view of the real tensor, whose strides may differ from these
        return found.contiguous() if strided and isinstance(found, Tensor) else found

    args, kwargs = pytree.tree_map_only(Node, argument, (node.args, node.kwargs))
    assert callable(node.target)  # the node calls a function: name_of gave its name
    return node.target(*args, **kwargs)


def _compact(expanded: Tensor) -> Tensor:
    """One entry along each axis on which all are the same memory: most intervals depend on the feature alone, not on sample or token."""
    return expanded[tuple(slice(1) if stride == 0 else slice(None) for stride in expanded.stride())]


def _constant(like: Any, number: int) -> Any:
    return pytree.tree_map_only(Tensor, lambda t: torch.tensor(number, dtype=torch.int32, device="cpu").expand(tuple(t.shape)), like)


def _hull(sources: list[_Rows]) -> tuple[int, int]:
    lowest = [int(_compact(t).min()) for rows in sources for t in pytree.tree_leaves(rows.lowest)]
    highest = [int(_compact(t).max()) for rows in sources for t in pytree.tree_leaves(rows.highest)]
    return min(lowest), max(highest)
