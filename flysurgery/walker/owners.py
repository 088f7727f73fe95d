"""Who owns what: the modules and weights of a model by their names."""

from __future__ import annotations

from torch import nn
from torch.fx import Node

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
        stack = list(node.meta.get("nn_module_stack", {}).values())
        if not stack:
            return None
        module = self.modules.get(stack[-1][0])
        return None if module is None else self.first_name(module)
