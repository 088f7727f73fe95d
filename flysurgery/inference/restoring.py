"""The way back from an optimized model."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from flysurgery.surgery import OPTIMIZED

Undo = tuple[tuple[nn.Module, str, nn.Module], ...]


def put(model: nn.Module, new: Mapping[str, nn.Module]) -> None:
    """Put modules in place under all names that the old ones have, and leave the way back on the model."""
    old = {fqn: model.get_submodule(fqn) for fqn in new}
    by_identity = {id(old[fqn]): module for fqn, module in new.items()}
    undo: list[tuple[nn.Module, str, nn.Module]] = []
    for parent in list(model.modules()):
        for name, child in parent._modules.items():
            if child is not None and id(child) in by_identity:
                undo.append((parent, name, child))
    for parent, name, child in undo:
        parent._modules[name] = by_identity[id(child)]
    setattr(model, OPTIMIZED, tuple(undo))


def restore(model: nn.Module) -> int:
    """Put back the modules that ``optimize`` replaced, in ``model`` and whatever in it was optimized by itself.

    Gives the number of modules; 0 for a model that is not optimized.
    """
    count = 0
    for owner in [module for module in model.modules() if OPTIMIZED in vars(module)]:
        undo: Undo = vars(owner)[OPTIMIZED]
        for parent, name, child in reversed(undo):
            parent._modules[name] = child
        count += len(undo)
        delattr(owner, OPTIMIZED)
    return count
