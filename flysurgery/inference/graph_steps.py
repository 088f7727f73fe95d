"""Steps along a traced graph: follows a value past operators that do nothing, and finds its only user."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor
from torch.fx import Node

from flysurgery.walker import is_in_place, name_of, shape_of

_COPIES = frozenset(("alias", "clone", "contiguous", "detach", "lift_fresh"))
_CASTS = frozenset(("to", "_to_copy", "type_as"))
_DROPOUTS = frozenset(("dropout", "feature_dropout"))
_SPLITS = frozenset(("chunk", "split"))


def is_idle(node: Node) -> bool:
    """Whether the node returns its first argument unchanged: an inactive dropout, a copy, a cast to the same dtype."""
    name = name_of(node)
    if name in _DROPOUTS:
        return len(node.args) > 2 and node.args[2] is False
    if name in _CASTS:
        return _kind(node) is not None and _kind(node) == _kind(node.args[0])
    return name in _COPIES


def origin(node: Node) -> Node:
    """The node itself, or the node whose value it passes on if it is idle."""
    while is_idle(node) and isinstance(node.args[0], Node):
        node = node.args[0]
    return node


def users(node: Node) -> list[Node]:
    """The nodes that use a value, followed past idle ones. An idle end counts as a user; the exporter's assertions do not."""
    found: list[Node] = []
    for user in node.users:
        if "_assert" in name_of(user):
            continue
        beyond = users(user) if is_idle(user) else []
        found += beyond or [user]
    return list(dict.fromkeys(found))


def sole_user(node: Node) -> Node | None:
    """The only node that uses a value; None where there are several or none."""
    found = users(node)
    return found[0] if len(found) == 1 else None


def between(start: Node, end: Node) -> set[Node]:
    """The idle nodes through which ``end`` takes the value of ``start``."""
    found: set[Node] = set()
    pending = [start]
    while pending:
        idle = [user for user in pending.pop().users if user is not end and is_idle(user)]
        found.update(idle)
        pending += idle
    return found


def summands(node: Node) -> tuple[Node, Node] | None:
    """The two operands of a sum of tensors of one shape that is a new tensor; None for any other node."""
    if name_of(node) != "add" or is_in_place(node) or node.kwargs or len(node.args) != 2:
        return None
    left, right = node.args
    if not (isinstance(left, Node) and isinstance(right, Node)) or _shape(left) != _shape(right):
        return None
    return left, right


class Half(NamedTuple):
    """One half of a value's last dimension: the value, the half's place (0 or 1), and the node that split it."""

    whole: Node
    place: int
    split: Node


def half_of(node: Node) -> Half | None:
    """The half that a node is; None where it is none."""
    split, place = node.args[:2] if name_of(node) == "getitem" else (None, None)
    if not isinstance(split, Node) or name_of(split) not in _SPLITS or not isinstance(split.args[0], Node) or len(split.meta["val"]) != 2:
        return None
    whole, after = shape_of(split.args[0]), shape_of(node)
    if not isinstance(place, int) or place not in (0, 1) or not after or whole != (*after[:-1], 2 * after[-1]):
        return None
    return Half(split.args[0], place, split)


def _kind(node: object) -> tuple[Any, ...] | None:
    value = node.meta.get("val") if isinstance(node, Node) else None
    return (value.dtype, value.device) if isinstance(value, Tensor) else None


def _shape(node: Node) -> object:
    return getattr(node.meta.get("val"), "shape", None)
