"""Who owns what: the modules and weights of a model by their names; and the attribute by which some owners call a linear."""

from __future__ import annotations

from torch import nn
from torch.fx import Node

from flysurgery.walker.operations import modules_of
from flysurgery.walker.target import Switch

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


# timm's beit, eva and swin_transformer_v2: the module is called, and the bias, which the parent holds, is added to its result.
_ATTRIBUTE = "qkv_bias_separate"


def set_switches(double: nn.Module) -> dict[str, Switch]:
    """Set the switches of a ``shadow`` whose parents read a weight without; returns them by the linear's name.

    Whether they do what they promise must show in a trace made afterwards.
    """
    switches = {}
    for fqn, parent in double.named_modules():
        if hasattr(parent, _ATTRIBUTE) and getattr(parent, "q_bias", None) is not None:  # without that bias there is nothing to switch
            setattr(parent, _ATTRIBUTE, True)
            switches[f"{fqn}.qkv" if fqn else "qkv"] = Switch(fqn, _ATTRIBUTE, True)
    return switches
