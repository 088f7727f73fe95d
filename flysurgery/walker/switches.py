"""Parents that read their linear's weight and offer an attribute to call the linear instead."""

from __future__ import annotations

from torch import nn

from flysurgery.walker.target import Switch

# timm's beit, eva and swin_transformer_v2: the module is called, and the bias, which the parent holds, is added to its result.
_ATTRIBUTE = "qkv_bias_separate"


def set_switches(double: nn.Module) -> dict[str, Switch]:
    """Set the switches of a ``shadow`` whose parents read a weight without; returns them by the linear's name.

    Whether they do what they promise must show in a trace made afterwards.
    """
    switches = {}
    for fqn, parent in double.named_modules():
        if offers_switch(parent) and getattr(parent, "q_bias", None) is not None:  # without that bias there is nothing to switch
            setattr(parent, _ATTRIBUTE, True)
            switches[f"{fqn}.qkv" if fqn else "qkv"] = Switch(fqn, _ATTRIBUTE, True)
    return switches


def offers_switch(module: nn.Module) -> bool:
    """Whether the module has the attribute that makes it call its linear."""
    return hasattr(module, _ATTRIBUTE)
