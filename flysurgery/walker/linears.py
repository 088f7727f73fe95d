"""The linear maps of a model: what a walk says of each, where the graph multiplies by a weight, and who owns and reads that weight."""

import math
from dataclasses import dataclass
from typing import Literal, get_args

from torch import nn
from torch.fx import Node

from flysurgery.walker.operations import CONVOLUTION, PRODUCT_OF_MATRICES, SHAPE, modules_of, name_of, shape_of
from flysurgery.walker.trace import HOOKS, Trace

Role = Literal["qkv", "attn_out", "ffn_in", "ffn_out", "head", "other"]
ROLES: tuple[Role, ...] = get_args(Role)
PARTS = {"qkv": "attention", "attn_out": "attention", "ffn_in": "feed-forward", "ffn_out": "feed-forward"}
"""The roles of linears within blocks, and which part of a block each is."""

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


@dataclass(frozen=True)
class Slice:
    """Rows ``start`` to ``stop`` (exclusive) of a fused projection's weight.

    ``name`` is ``"q"``, ``"k"``, ``"v"`` or ``"ffn"``; joined by ``"_"`` where the same rows serve two of them (``"k_v"``).
    """

    name: str
    start: int
    stop: int


@dataclass(frozen=True)
class Switch:
    """An attribute to set on the module ``module_fqn``, so that it calls its linear and does not read the linear's weight."""

    module_fqn: str
    attribute: str
    value: bool


@dataclass(frozen=True)
class Obstacle:
    """A reason against replacing a target. ``blocking``: the model would not stay right; otherwise it can be done, but rarely should."""

    code: str
    text: str
    blocking: bool


@dataclass(frozen=True)
class Target:
    """A linear map of the model, as the traced graph shows it.

    ``fqn`` names the module, which for an ``nn.MultiheadAttention`` is one of the ``SeparateAttention`` in its place; where the weight
    is a bare parameter of a larger module (obstacle ``raw-weight``) it names that parameter. ``rows`` counts the rows that one forward
    multiplies, summed over ``calls``, for the example that was walked: divide by the example's batch size for rows an image. ``bias``
    says whether the module itself holds one. ``aliases`` are further names of the same module. ``split`` holds the row ranges of a fused
    projection, in ascending order and covering all rows, or None where the graph proves none or there is nothing to split.
    """

    fqn: str
    role: Role
    in_features: int
    out_features: int
    bias: bool
    calls: int
    rows: int
    obstacles: tuple[Obstacle, ...] = ()
    split: tuple[Slice, ...] | None = None
    aliases: tuple[str, ...] = ()
    switches: tuple[Switch, ...] = ()

    @property
    def blocked(self) -> bool:
        """Whether some obstacle makes a replacement impossible."""
        return any(obstacle.blocking for obstacle in self.obstacles)


_BLOCKING = {
    "weight-read": "its parent reads the weight, at least in some cases, and does not call the module",
    "raw-weight": "the weight is a parameter of a larger module, there is no nn.Linear to replace",
    "conv1x1": "it is a 1x1 convolution, replaced only where convs are asked for (--convs)",
    "conv-stride": "the convolution has a stride, padding or groups",
    "parametrized": "its weight is parametrized (computed from other tensors)",
    "custom-forward": "its class or the module itself overrides the forward of torch's own",
    "hooked": "it has hooks, which a replacement would lose",
    "tied": "its weight is shared with another module",
    "dtype": "its weight is not a floating-point tensor",
    "not-called": "the forward pass does not use it",
}
_ADVICE = {
    "head": "it is a classifier head",
    "pool": "it serves attention pooling or a pooled vector: one row an image, nothing to gain",
    "constant": "its input is the same for every image (a position bias, or learned queries)",
    "patch-embedding": "it embeds the patches of the input",
    "talking-heads": "it mixes the heads of attention scores",
    "rank-one": "one of its sides is 1, so that its matrix has one row or column: nothing to gain",
    "no-role": "it belongs neither to attention nor to a feed-forward block",
}
OBSTACLES = {code: Obstacle(code, text, code in _BLOCKING) for code, text in (_BLOCKING | _ADVICE).items()}
"""All obstacles, by their codes."""


def has_own_forward(module: nn.Module) -> bool:
    """Whether the forward of a linear or convolution is another one than that of its class in torch."""
    plain = next((kind for kind in type(module).__mro__ if kind.__module__.startswith("torch.nn.modules")), nn.Module)
    return type(module).forward is not plain.forward or "forward" in vars(module)


def is_hooked(module: nn.Module) -> bool:
    """Whether a replacement of the module would lose hooks."""
    return any(getattr(module, name, None) for name in HOOKS)


def module_obstacles(module: nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d) -> tuple[Obstacle, ...]:
    """The obstacles that show on the module itself, without a graph."""
    weight = module._parameters.get("weight")  # a parametrized one is not read: that would compute it, and may change its buffers
    is_plain = isinstance(module, nn.Linear) or (
        {*module.kernel_size, *module.stride} == {1} and module.groups == 1 and not any(module.padding)
    )
    found = {
        "parametrized": hasattr(module, "parametrizations"),
        "custom-forward": has_own_forward(module),
        "conv-stride": not is_plain,
        "hooked": is_hooked(module),
        "dtype": weight is not None and not weight.is_floating_point(),
    }
    return tuple(OBSTACLES[code] for code, is_there in found.items() if is_there)


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
        """The other names of the module of that first name; none of what is no module."""
        return tuple(name for name, other in self.modules.items() if other is self.modules.get(fqn) and name != fqn)

    def holders(self, parameter_fqn: str) -> list[str]:
        """First names of the nn.Linear modules and convolutions that hold this parameter as their weight."""
        return self._holders.get(id(self._parameters.get(parameter_fqn)), [])

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
    """Set the switches of a ``shadow`` whose parents read a weight without, and give them by the linear's name; a trace must show it."""
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


def call_of(trace: Trace, owners: Owners, node: Node) -> Call | None:
    """What the node multiplies; None unless it multiplies rows by a matrix that comes from a parameter."""
    name, is_conv = name_of(node), name_of(node) in CONVOLUTION
    first, second, third = (*node.args, None, None, None)[:3]
    if name == "linear" or is_conv:
        source, weight, bias = first, second, third is not None
    elif name == "addmm":
        source, weight, bias = second, third, True
    elif name in PRODUCT_OF_MATRICES and third is None:  # einsum and baddbmm have three operands or a string first
        source, weight, bias = first, second, False
    else:
        return None
    if not (isinstance(source, Node) and isinstance(weight, Node)):
        return None
    shape, matrix = shape_of(source), shape_of(weight)
    if matrix is None or not (_is_pointwise(matrix, shape, shape_of(node)) if is_conv else len(matrix) == 2):
        return None
    owner = _owner(trace, owners, node, weight)
    if owner is None:
        return None
    kind, fqn, inside = owner
    out_features, in_features = matrix[:2] if is_conv or name == "linear" else (matrix[1], matrix[0])
    if kind == "linear":
        stored = owners.modules[fqn]._parameters.get("weight")  # of which a parent may use a part, or its transpose
        out_features, in_features = stored.shape if stored is not None else (out_features, in_features)
    rows = math.prod(shape) // max(in_features, 1) if shape is not None else 0
    return Call(node, source, kind, fqn, inside, in_features, out_features, rows, bias)


def _is_pointwise(weight: tuple[int, ...], source: tuple[int, ...] | None, result: tuple[int, ...] | None) -> bool:
    """Whether a convolution of these shapes has one group, a kernel of one, no stride and no padding."""
    if source is None or result is None:
        return False
    return math.prod(weight[2:]) == 1 and len(source) == len(weight) and weight[1] == source[1] and source[2:] == result[2:]


def _owner(trace: Trace, owners: Owners, node: Node, weight: Node) -> tuple[str, str, bool] | None:
    """Of what belongs to the weight of a call: the kind, the name, and whether the call ran inside of it."""
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
