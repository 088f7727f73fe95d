"""Who owns what: the modules and weights of a model by their names; and whose weights the source of a module reads.

A trace may not show such a read, because a condition kept the forward pass from it.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Iterator
from types import FunctionType

from torch import nn
from torch.fx import Node

from flysurgery.walker.operations import modules_of

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


class Owners:
    """The names of a model's modules and weights. Where a module has several, the first one stands for it."""

    def __init__(self, model: nn.Module):
        self.modules = dict(model.named_modules(remove_duplicate=False))
        self._first_name = {id(module): fqn for fqn, module in model.named_modules()}
        self._parameters = dict(model.named_parameters(remove_duplicate=False))
        self._holders: dict[int, list[str]] = {}
        for fqn, module in model.named_modules():
            if isinstance(module, (nn.Linear, *CONVOLUTIONS)):
                weight = module._parameters.get("weight")  # None where the weight is computed
                if weight is not None:
                    self._holders.setdefault(id(weight), []).append(fqn)

    def first_name(self, module: nn.Module) -> str:
        """The name under which ``named_modules`` lists the module."""
        return self._first_name[id(module)]

    def further_names(self, fqn: str) -> tuple[str, ...]:
        """The other names of the module of that first name."""
        module = self.modules[fqn]
        return tuple(name for name, other in self.modules.items() if other is module and name != fqn)

    def holders(self, parameter_fqn: str) -> list[str]:
        """First names of the nn.Linear modules and convolutions that hold this parameter as their weight."""
        return self._holders.get(id(self._parameters[parameter_fqn]), [])

    def is_tied(self, fqn: str) -> bool:
        """Whether another module holds the same weight parameter."""
        return len(self._holders.get(id(self.modules[fqn]._parameters.get("weight")), [])) > 1

    def innermost(self, node: Node) -> str | None:
        """First name of the module in whose forward the node ran."""
        stack = modules_of(node)
        module = self.modules.get(stack[-1][0]) if stack else None
        return None if module is None else self.first_name(module)

    def around(self, node: Node) -> tuple[str, ...]:
        """First names of the modules in whose forwards the node ran, the outermost first."""
        return tuple(self.first_name(self.modules[name]) for name, _ in modules_of(node) if name in self.modules)


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
