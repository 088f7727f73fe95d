"""Parents that read their linear's weight and offer an attribute to call the linear instead."""

from __future__ import annotations

from typing import Any

from torch import nn

from flysurgery.errors import WalkError
from flysurgery.walker.target import Switch
from flysurgery.walker.trace import one_line, run_fake, shadow

# timm's beit, eva and swin_transformer_v2: the module is called, and the bias, which the parent holds, is added to its result.
_ATTRIBUTES = ("qkv_bias_separate",)


def set_switches(double: nn.Module, example: tuple[Any, ...]) -> dict[str, Switch]:
    """Set the switches of a ``shadow`` whose parents do not call a linear of theirs without; returns them by the linear's name.

    Whether they do what they promise must show in a trace made afterwards.
    """
    # the bias that such a parent adds is its own parameter; without one there is nothing to switch
    parents = [(fqn, module) for fqn, module in double.named_modules() if any(True for _ in module.parameters(recurse=False))]
    offers = [(fqn, parent, name) for fqn, parent in parents for name in _ATTRIBUTES if hasattr(parent, name)]
    if not offers:
        return {}
    called = _called_without(double, example)
    switches = {}
    for fqn, parent, attribute in offers:
        names = [f"{fqn}.{name}" if fqn else name for name, child in parent.named_children() if isinstance(child, nn.Linear)]
        silent = [name for name in names if name not in called]
        if silent:
            setattr(parent, attribute, True)
        switches.update({name: Switch(fqn, attribute, True) for name in silent})
    return switches


def offers_switch(module: nn.Module) -> bool:
    """Whether the module has an attribute that makes it call its linear."""
    return any(hasattr(module, name) for name in _ATTRIBUTES)


def _called_without(double: nn.Module, example: tuple[Any, ...]) -> set[str]:
    """Names of the nn.Linear modules that one forward on fake tensors calls while the switches are off."""
    called: set[str] = set()
    probe = shadow(double)  # the forward may leave fake tensors behind in the modules
    for fqn, module in probe.named_modules():
        for name in _ATTRIBUTES:
            if hasattr(module, name):
                setattr(module, name, False)
        if isinstance(module, nn.Linear):
            module.register_forward_pre_hook(lambda *_, fqn=fqn: called.add(fqn))
    try:
        run_fake(probe, example)
    except Exception as error:
        raise WalkError(f"{type(double).__name__} cannot be walked, because its forward pass fails: {one_line(error)}") from error
    return called
