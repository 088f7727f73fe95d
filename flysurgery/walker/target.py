"""What a walk finds: targets, what is known about each, and the obstacles to replacing it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from torch import nn

Role = Literal["qkv", "attn_out", "ffn_in", "ffn_out", "head", "other"]
ROLES: tuple[Role, ...] = get_args(Role)
PARTS = {"qkv": "attention", "attn_out": "attention", "ffn_in": "feed-forward", "ffn_out": "feed-forward"}
"""The roles of linears within blocks, and which part of a block each is."""

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


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
class Target:
    """A linear map of the model, as the traced graph shows it.

    ``fqn`` names the module, which for an ``nn.MultiheadAttention`` is one of the ``SeparateAttention`` in its place; where the weight
    is a bare parameter of a larger module (obstacle ``raw-weight``) it names that parameter.
    ``rows`` counts the rows that one forward multiplies, summed over ``calls``, for the example that was walked: divide by the
    example's batch size for rows an image. ``bias`` says whether the module itself holds one. ``aliases`` are further names of
    the same module. ``split`` holds the row ranges of a fused projection, in ascending order and covering all rows, or None where
    the graph does not prove them or where there is nothing to split.
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


@dataclass(frozen=True)
class Obstacle:
    """A reason against replacing a target. ``blocking``: the model would not stay right; otherwise it can be done, but rarely should."""

    code: str
    text: str
    blocking: bool


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


def is_plain_pointwise(module: nn.Conv1d | nn.Conv2d | nn.Conv3d) -> bool:
    """Whether a convolution multiplies each pixel's channels by a matrix, at any size of its input."""
    return {*module.kernel_size, *module.stride} == {1} and module.groups == 1 and not any(module.padding)


def has_own_forward(module: nn.Module) -> bool:
    """Whether the forward of a linear or convolution is another one than that of its class in torch."""
    plain = next((kind for kind in type(module).__mro__ if kind.__module__.startswith("torch.nn.modules")), nn.Module)
    return type(module).forward is not plain.forward or "forward" in vars(module)


def module_obstacles(module: nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d) -> tuple[Obstacle, ...]:
    """The obstacles that show on the module itself, without a graph."""
    codes = []
    if hasattr(module, "parametrizations"):
        codes.append("parametrized")
    if has_own_forward(module):
        codes.append("custom-forward")
    if not isinstance(module, nn.Linear) and not is_plain_pointwise(module):
        codes.append("conv-stride")
    if is_hooked(module):
        codes.append("hooked")
    weight = module._parameters.get("weight")  # a parametrized one is not read: that would compute it, and may change its buffers
    if weight is not None and not weight.is_floating_point():
        codes.append("dtype")
    return tuple(OBSTACLES[code] for code in codes)


def is_hooked(module: nn.Module) -> bool:
    """Whether a replacement of the module would lose hooks."""
    return any(getattr(module, name, None) for name in HOOKS)
