"""Puts fused modules into a model, and restores the model's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import nn

from flysurgery.inference.methods import StandInMethod
from flysurgery.inference.standin import StandIn
from flysurgery.surgery import STANDS_FOR


class Fused(NamedTuple):
    """New modules by the names of the modules that they replace, and methods by the names of modules and their own."""

    modules: dict[str, StandIn]
    methods: dict[tuple[str, str], StandInMethod]


def put(model: nn.Module, fused: Fused) -> None:
    """Put modules in place under all names of the old ones, and methods on modules. For ``model`` itself, set its forward."""
    methods = list[tuple[nn.Module, str, Callable[..., Any]]]()
    methods += [(model.get_submodule(fqn), name, method) for (fqn, name), method in fused.methods.items()]
    old = {id(model.get_submodule(fqn)): module for fqn, module in fused.modules.items()}
    for parent, name, child in _children(model):
        if id(child) in old:
            parent._modules[name] = old[id(child)]
    if "" in fused.modules:
        methods.append((model, "forward", fused.modules[""].forward))
    for module, name, method in methods:
        vars(module).update({name: method, STANDS_FOR: (module, name)})
    for each in (*fused.modules.values(), *fused.methods.values()):
        each.condition.settle()


def restore(model: nn.Module) -> int:
    """Put back the modules that ``optimize`` replaced, in ``model`` and in modules of it that were optimized separately.

    Returns the number of these modules and of those on which a method was set; 0 for a model that is not optimized.
    """
    fused = [(parent, name, child) for parent, name, child in _children(model) if isinstance(child, StandIn)]
    for parent, name, child in fused:
        parent._modules[name] = child.original
    themselves = [module for module in model.modules() if STANDS_FOR in vars(module)]
    for module in themselves:
        _, name = vars(module).pop(STANDS_FOR)
        del vars(module)[name]
    return len(fused) + len(themselves)


def _children(model: nn.Module) -> list[tuple[nn.Module, str, nn.Module]]:
    """Each module in ``model`` with its parent and its name there, as they are now."""
    return [(parent, name, child) for parent in model.modules() for name, child in parent._modules.items() if child is not None]
