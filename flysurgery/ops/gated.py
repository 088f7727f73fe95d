"""The hidden units of a gated feed-forward block: an activated gate times a value, both made of the same normed input."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear as torch_linear

from flysurgery.ops.cuda.device import device_obstacle
from flysurgery.ops.cuda.gated import gated_obstacle
from flysurgery.ops.multiply import ks_linear
from flysurgery.ops.normed import normed
from flysurgery.ops.parts import Dense, Gated, Linear, Norm


def gated_hidden(
    x: Tensor,  # shape: (*batch, in_features)
    norm: Norm | None,
    up: Gated,
    activation: str,
) -> Tensor:  # shape: (*batch, hidden)
    """``activation(gate(norm(x))) * value(norm(x))`` where ``gated_reason`` has none against it."""
    entering = normed(x, norm)
    outputs = [multiplied(entering, member) for member in up.members]
    parts = outputs if len(outputs) == 2 else outputs[0].chunk(2, dim=-1)
    gate, value = (part.flatten(0, -2) for part in (parts[up.gate], parts[1 - up.gate]))
    return torch.ops.flysurgery.gated(gate, value, activation).view(*x.shape[:-1], gate.shape[-1])


def gated_reason(x: Tensor, up: Gated, activation: str) -> str | None:
    """Why no kernel takes gate and value of these layers; None where one does. Whether x and the norm fit them is not asked here."""
    outputs = [member.sizes[1] for member in up.members]
    if len(outputs) not in (1, 2) or outputs[0] != outputs[-1] or sum(outputs) % 2:
        return f"expected two layers for gate and value with as many outputs, or one whose outputs are both, got {outputs} outputs"
    return _gated_obstacle(up.sizes[1], x.dtype, activation)


def multiplied(x: Tensor, linear: Linear) -> Tensor:
    """A linear without epilogue, by PyTorch or by the backend that ``ks_linear`` chooses."""
    return torch_linear(x, linear.weight, linear.bias) if isinstance(linear, Dense) else ks_linear(x, linear.factors, linear.bias)


@torch.compiler.assume_constant_result  # depends on the machine and the arguments alone
def _gated_obstacle(features: int, dtype: torch.dtype, activation: str) -> str | None:
    return device_obstacle() or gated_obstacle(features, dtype, activation)
