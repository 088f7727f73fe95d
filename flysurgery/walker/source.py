"""Reads of a child's weight that a trace may not show, because a condition kept the forward pass from them: they stand in the source."""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Iterator
from types import FunctionType

from torch import nn

_TENSORS = ("weight", "bias")


@functools.lru_cache(maxsize=1024)
def children_read(module_class: type[nn.Module]) -> frozenset[str]:
    """Names of children, dotted where they are deeper, whose weight or bias the forward of that class, or a method that it uses, reads.

    Empty where there is no source to look into.
    """
    found: set[str] = set()
    seen: set[str] = set()
    pending = ["forward"]
    while pending:
        name = pending.pop()
        function = inspect.getattr_static(module_class, name, None)
        if name in seen or not isinstance(function, FunctionType):
            continue
        seen.add(name)
        for path in _paths_of_self(function):
            pending.append(path[0])
            if len(path) > 2 and path[-2] in _TENSORS:  # what is read of the weight: its device, its shape
                path = path[:-1]
            if len(path) > 1 and path[-1] in _TENSORS:
                found.add(".".join(path[:-1]))
    return frozenset(found)


def _paths_of_self(function: FunctionType) -> Iterator[list[str]]:
    """Attributes of the method's first argument: ``["qk", "weight"]`` for ``self.qk.weight``, and its beginnings."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(function))))
    except (OSError, TypeError, SyntaxError):
        return
    itself = function.__code__.co_varnames[:1]
    for node in ast.walk(tree):
        path: list[str] = []
        while isinstance(node, ast.Attribute):
            path.insert(0, node.attr)
            node = node.value
        if path and isinstance(node, ast.Name) and (node.id,) == itself:
            yield path
