"""An optimized model's fused modules put in place, and the way back."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from flysurgery.inference.standing import StandIn
from flysurgery.surgery import STANDS_FOR


def put(model: nn.Module, new: Mapping[str, nn.Module]) -> None:
    """Put modules in place under all names that the old ones have; in place of ``model`` itself, which stays, their forward."""
    old = {id(model.get_submodule(fqn)): module for fqn, module in new.items()}
    for parent, name, child in _children(model):
        if id(child) in old:
            parent._modules[name] = old[id(child)]
    if "" in new:
        vars(model).update({"forward": new[""].forward, STANDS_FOR: (model,)})


def restore(model: nn.Module) -> int:
    """Put back the modules that ``optimize`` replaced, in ``model`` and whatever in it was optimized by itself.

    Gives the number of modules; 0 for a model that is not optimized.
    """
    fused = [(parent, name, child) for parent, name, child in _children(model) if isinstance(child, StandIn)]
    for parent, name, child in fused:
        parent._modules[name] = child.original
    themselves = [module for module in model.modules() if STANDS_FOR in vars(module)]
    for module in themselves:
        del vars(module)["forward"], vars(module)[STANDS_FOR]
    return len(fused) + len(themselves)


def _children(model: nn.Module) -> list[tuple[nn.Module, str, nn.Module]]:
    """Each module in ``model`` with its parent and its name there, as they are now."""
    return [(parent, name, child) for parent in model.modules() for name, child in parent._modules.items() if child is not None]
