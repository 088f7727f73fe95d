"""Why a target cannot, or should not, be replaced: every reason code in one table, and the checks on the module itself."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

# blocking: surgery cannot replace the target and keep the model right. Not blocking: it can, and should only where it is asked to by role.
_TABLE: dict[str, tuple[bool, str]] = {
    "weight-read": (True, "its parent reads the weight, at least in some cases, and does not call the module"),
    "raw-weight": (True, "the weight is a parameter of a larger module, there is no nn.Linear to replace"),
    "conv1x1": (True, "it is a 1x1 convolution, replaced only where convs are asked for (--convs)"),
    "conv-stride": (True, "the convolution has a stride, padding or groups"),
    "parametrized": (True, "its weight is parametrized (computed from other tensors)"),
    "custom-forward": (True, "its class or the module itself overrides the forward of torch's own"),
    "hooked": (True, "it has hooks, which a replacement would lose"),
    "tied": (True, "its weight is shared with another module"),
    "dtype": (True, "its weight is not a floating-point tensor"),
    "not-called": (True, "the forward pass does not use it"),
    "head": (False, "it is a classifier head"),
    "pool": (False, "it serves attention pooling or a pooled vector: one row an image, nothing to gain"),
    "position-mlp": (False, "its input does not depend on the image (a position bias)"),
    "patch-embedding": (False, "it embeds the patches of the input"),
    "talking-heads": (False, "it mixes the heads of attention scores"),
    "rank-one": (False, "one of its sides is 1, so that its matrix has one row or column: nothing to gain"),
    "no-role": (False, "it belongs neither to attention nor to a feed-forward block"),
}
CODES: tuple[str, ...] = tuple(_TABLE)


@dataclass(frozen=True)
class Obstacle:
    """A reason against replacing a target. ``blocking``: it cannot be done; otherwise it can, but rarely should."""

    code: str
    text: str
    blocking: bool


def obstacle(code: str) -> Obstacle:
    """The obstacle of that reason code."""
    blocking, text = _TABLE[code]
    return Obstacle(code, text, blocking)


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
    if _is_hooked(module):
        codes.append("hooked")
    weight = module._parameters.get("weight")  # a parametrized one is not read: that would compute it, and may change its buffers
    if weight is not None and not weight.is_floating_point():
        codes.append("dtype")
    return tuple(obstacle(code) for code in codes)


def _is_hooked(module: nn.Module) -> bool:
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return any(getattr(module, name, None) for name in hooks)
