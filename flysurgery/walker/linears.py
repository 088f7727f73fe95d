"""Which nodes of the graph are linear maps by a parameter, which modules own the parameters, and whose weights are read elsewhere too."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import nn
from torch.fx import Node

from flysurgery.walker.operations import CONVOLUTION, PRODUCT_OF_MATRICES, SHAPE, modules_of, name_of, shape_of
from flysurgery.walker.target import Switch
from flysurgery.walker.trace import Trace

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


@dataclass(frozen=True)
class Call:
    """One multiplication by a weight: where it stands in the graph, its input, and what it belongs to.

    ``fqn`` is the module's first name, or the parameter's where ``kind`` is ``"raw"``. ``inside``: it ran in the forward of that module.
    ``rows`` is 0 where their number depends on data.
    """

    node: Node
    source: Node
    kind: str  # "linear": an nn.Linear; "conv": a 1x1 convolution; "raw": a parameter of some other module
    fqn: str
    inside: bool
    in_features: int
    out_features: int
    rows: int
    bias: bool


def find_calls(trace: Trace, owners: Owners) -> list[Call]:
    """Every multiplication by a parameter, in the order of execution."""
    found = [(node, _operands(node)) for node in trace.graph.nodes]
    calls = (_call(trace, owners, node, *operands) for node, operands in found if operands is not None)
    return [call for call in calls if call is not None]


def _operands(node: Node) -> tuple[Node, Node, bool] | None:
    """Input, weight and whether a bias is added, if the node may be a multiplication of rows by a matrix."""
    name = name_of(node)
    first, second, third = (*node.args, None, None, None)[:3]
    if name == "linear" or (name in CONVOLUTION and _is_pointwise_convolution(node)):
        source, weight, bias = first, second, third is not None
    elif name == "addmm":
        source, weight, bias = second, third, True
    elif name in PRODUCT_OF_MATRICES and third is None:  # einsum and baddbmm have three operands or a string first
        source, weight, bias = first, second, False
    else:
        return None
    return (source, weight, bias) if isinstance(source, Node) and isinstance(weight, Node) else None


def _is_pointwise_convolution(node: Node) -> bool:
    weight = node.args[1]
    shape = shape_of(weight) if isinstance(weight, Node) else None
    source = shape_of(node.args[0]) if isinstance(node.args[0], Node) else None
    result = shape_of(node)
    if shape is None or source is None or result is None:
        return False
    # one group, kernel of one, no stride and no padding
    return math.prod(shape[2:]) == 1 and len(source) == len(shape) and shape[1] == source[1] and source[2:] == result[2:]


def _call(trace: Trace, owners: Owners, node: Node, source: Node, weight: Node, bias: bool) -> Call | None:
    matrix = shape_of(weight)
    is_conv = name_of(node) in CONVOLUTION
    owner = _owner(trace, owners, node, weight)
    if owner is None or matrix is None or not (is_conv or len(matrix) == 2):
        return None
    kind, fqn, inside = owner
    out_features, in_features = matrix[:2] if is_conv or name_of(node) == "linear" else (matrix[1], matrix[0])
    if kind == "linear":
        stored = owners.modules[fqn]._parameters.get("weight")  # of which a parent may use a part, or its transpose
        out_features, in_features = stored.shape if stored is not None else (out_features, in_features)
    shape = shape_of(source)
    rows = math.prod(shape) // max(in_features, 1) if shape is not None else 0
    return Call(node, source, kind, fqn, inside, in_features, out_features, rows, bias)


def _owner(trace: Trace, owners: Owners, node: Node, weight: Node) -> tuple[str, str, bool] | None:
    innermost = owners.innermost(node)
    parameter = trace.parameters.get(weight)
    holders = owners.holders(parameter) if parameter is not None else []
    inside = innermost in holders or (parameter is None and isinstance(owners.modules.get(innermost or ""), nn.Linear))
    if innermost is None or not inside:
        inside, raw = False, _parameter_behind(trace, weight)
        if raw is None:
            return None
        holders = owners.holders(raw)
        if not holders:
            return "raw", raw, False
        innermost = holders[0]
    return "linear" if isinstance(owners.modules[innermost], nn.Linear) else "conv", innermost, inside


def _parameter_behind(trace: Trace, weight: Node) -> str | None:
    """The parameter that a weight is a transpose, slice or reshape of."""
    node = weight
    while node not in trace.parameters:
        first = node.args[0] if node.args else None
        if name_of(node) not in SHAPE or not isinstance(first, Node):
            return None
        node = first
    return trace.parameters[node]


def read_elsewhere(trace: Trace, owners: Owners, calls: list[Call]) -> set[str]:
    """First names of the nn.Linear modules and convolutions whose weight or bias some other module reads."""
    found = {call.fqn for call in calls if call.kind != "raw" and not call.inside}
    for module in owners.modules.values():
        # the fast path of such a layer, which no trace shows, reads the weights of all its linears
        if isinstance(module, nn.TransformerEncoderLayer) and isinstance(module.self_attn, nn.MultiheadAttention):
            found |= {owners.first_name(linear) for linear in (module.linear1, module.linear2)}
    for placeholder, parameter in trace.parameters.items():
        fqn, _, leaf = parameter.rpartition(".")
        module = owners.modules.get(fqn)
        if not isinstance(module, (nn.Linear, *CONVOLUTIONS)) or leaf not in ("weight", "bias"):
            continue
        readers = {owners.innermost(user) for user in placeholder.users if user.users}  # else it asks whether there is a bias
        if not readers <= {owners.first_name(module), *owners.holders(parameter)}:
            found.add(owners.first_name(module))
    return found
