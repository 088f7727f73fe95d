"""Integers in the place of a value's entries, which say what each of them comes from, and operators that only move entries."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.fx import Node
from torch.utils import _pytree as pytree

from flysurgery.walker import operations as ops


def moved(node: Node, labels: Callable[[Node], Any]) -> Any:
    """Run an operator that moves entries on the ``labels`` of its arguments."""
    strided = ops.name_of(node) in ops.STRIDED

    def argument(arg: Node) -> Any:
        found = labels(arg)
        # a view of the real tensor, whose strides may differ from these
        return found.contiguous() if strided and isinstance(found, Tensor) else found

    args, kwargs = pytree.tree_map_only(Node, argument, (node.args, node.kwargs))
    assert callable(node.target)  # the node calls a function: name_of gave its name
    return node.target(*args, **kwargs)


def compact(expanded: Tensor) -> Tensor:
    """One entry along each axis on which all are the same memory: most labels depend on the feature alone, not on sample or token."""
    return expanded[tuple(slice(1) if stride == 0 else slice(None) for stride in expanded.stride())]


def axes_of_change(labels: Tensor) -> set[int]:
    """The axes along which labels differ."""
    small = compact(labels)
    if not small.numel():
        return set()
    return {axis for axis in range(small.dim()) if bool((small != small.narrow(axis, 0, 1)).any())}


def without_repeats(labels: Tensor) -> Tensor:
    """One entry along each axis on which nothing changes."""
    changing = axes_of_change(labels)
    return labels[tuple(slice(None) if axis in changing else slice(1) for axis in range(labels.dim()))]
