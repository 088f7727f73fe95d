"""Where one tensor carries everything that the rest of a model needs: the places at which two models can be compared."""

from dataclasses import dataclass, replace
from typing import Literal

from torch.fx import Node

from flysurgery.walker.linears import PARTS
from flysurgery.walker.operations import modules_of, name_of, shape_of
from flysurgery.walker.walk import Survey


@dataclass(frozen=True)
class Cut:
    """A tensor that every later layer depends on, and nothing else does: what module ``fqn`` is given, or what it gives.

    ``shape`` is that of the example. ``kind`` is "start" for the last cut before the first linear of attention or of a feed-forward part,
    "block" for the stream after a block of the two, "tokens" for the last tensor with tokens, after a norm where there is one.
    """

    fqn: str
    side: Literal["input", "output"]
    shape: tuple[int, ...]
    kind: Literal["start", "block", "tokens", "other"] = "other"


def find_cuts(seen: Survey) -> tuple[Cut, ...]:
    """The cuts of a traced model at which a module begins or ends, in the order of execution.

    Where only one value that depends on the input is still to be read, it is a cut. Blocks follow from the roles of the linears between
    the cuts, not from names. A model whose values are all read late, such as one with long skip connections, has few cuts or none.
    """
    nodes = list(seen.trace.graph.nodes)
    place = {node: index for index, node in enumerate(nodes)}
    last = {node: max((place[user] for user in node.users), default=-1) for node in nodes}
    found: dict[Node, Cut] = {}
    kinds: dict[Node, Literal["start", "block", "tokens"]] = {}
    live, met = set[Node](), set[str]()
    for index, node in enumerate(nodes):
        role = seen.verdicts.get(node)
        if role in PARTS:
            begins = (PARTS[role] == "attention" and "feed-forward" in met) or (role == "ffn_in" and met == {"feed-forward"})
            if found and (begins or not kinds):
                kinds[[*found][-1]] = "block" if kinds else "start"
                met = set()
            met.add(PARTS[role])
        if node.op == "output" or node not in seen.dataflow.depends:
            continue
        live = {each for each in (*live, node) if last[each] > index}
        cut = _cut(node, min(node.users, key=place.__getitem__)) if live == {node} else None
        if cut is not None:
            found[node] = cut
    last_block = place[[*kinds][-1]] if kinds else len(nodes)
    tokens = [node for node, cut in found.items() if place[node] > last_block and len(cut.shape) > 2]
    streams = [node for node in tokens[:-1] if "norm" not in name_of(node)]
    if streams:
        kinds[streams[-1]] = "block"
    if tokens:
        kinds[tokens[-1]] = "tokens"
    unique = {(cut.fqn, cut.side): node for node, cut in reversed(found.items())}
    return tuple(replace(found[node], kind=kinds.get(node, "other")) for node in reversed(unique.values()))


def _cut(node: Node, user: Node) -> Cut | None:
    """The innermost module that ends with ``node``, or else the outermost that begins with it."""
    shape = shape_of(node)
    inside, after = ([fqn for fqn, _ in modules_of(each) if fqn] for each in (node, user))
    left = [fqn for fqn in inside if fqn not in after]
    entered = [fqn for fqn in after if fqn not in inside]
    if not shape or not (left or entered):
        return None
    return Cut(left[-1], "output", tuple(shape)) if left else Cut(entered[0], "input", tuple(shape))
