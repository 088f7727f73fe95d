"""Linears between which each feature goes its own way: the two of a plain feed-forward block."""

from __future__ import annotations

from collections import Counter

from torch.fx import Node

from flysurgery.walker.linears import Call
from flysurgery.walker.operations import ACTIVATION, IDENTITY, POINTWISE, STRIDED, name_of, shape_of

_ELEMENTWISE = (ACTIVATION | IDENTITY | POINTWISE) - {"glu"}
_RESHAPES = STRIDED | {"reshape", "flatten", "unflatten"}


def element_wise_pairs(calls: list[Call]) -> dict[str, str]:
    """For each linear all of whose output goes, feature by feature, into one other linear and nowhere else: that linear's name.

    Between the two stand only operators that map each entry by itself, by the same function for all features: a permutation of the
    first one's rows and bias is undone by that of the second one's columns. Scales, gates and norms over features are not of that kind.
    """
    calls = [call for call in calls if call.kind == "linear"]  # a convolution has its features on another axis
    by_node = {call.node: call for call in calls}
    times = Counter(call.fqn for call in calls)
    reached: dict[str, list[str | None]] = {}
    for call in calls:
        reached.setdefault(call.fqn, []).append(_only_reader(call, by_node))
    pairs = {first: readers[0] for first, readers in reached.items() if readers[0] is not None and set(readers) == {readers[0]}}
    return {first: second for first, second in pairs.items() if times[first] == times[second] and first != second}


def _only_reader(call: Call, by_node: dict[Node, Call]) -> str | None:
    """The linear that reads the call's output, if it alone does, and once."""
    pending, readers = [call.node], []
    while pending:
        node = pending.pop()
        for user in node.users:
            reader = by_node.get(user)
            if reader is not None and reader.source is node and user.all_input_nodes.count(node) == 1:
                readers.append(reader.fqn)
            elif _is_element_wise(user, node):
                pending.append(user)
            else:
                return None
    return readers[0] if len(readers) == 1 else None


def _is_element_wise(user: Node, node: Node) -> bool:
    before, after = shape_of(node), shape_of(user)
    if user.all_input_nodes != [node] or before is None or after is None:
        return False
    name = name_of(user)
    return (name in _ELEMENTWISE and before == after) or (name in _RESHAPES and before[-1] == after[-1])
