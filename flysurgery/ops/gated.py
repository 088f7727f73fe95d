"""The hidden units of a gated feed-forward block: an activated gate times a value, both made of the same normed input."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear as torch_linear

from flysurgery.ops.cuda.dense import dense_advice, dense_obstacle
from flysurgery.ops.cuda.device import device_obstacle
from flysurgery.ops.cuda.gated import gated_obstacle
from flysurgery.ops.cuda.gated_linear import gated_linear_obstacle
from flysurgery.ops.cuda.modes import mode_of, tf32_allowed
from flysurgery.ops.multiply import ks_linear
from flysurgery.ops.normed import normed
from flysurgery.ops.parts import Dense, FusedFactors, Gated, Linear, Norm
from flysurgery.patterns import Architecture


def gated_hidden(
    x: Tensor,  # shape: (*batch, in_features)
    norm: Norm | None,
    up: Gated,
    activation: str,
) -> Tensor:  # shape: (*batch, hidden)
    """``activation(gate(norm(x))) * value(norm(x))`` where ``gated_reason`` has none against it.

    One launch for factors whose outputs are both, with the norm where that fits as well, and one for dense layers behind the norm's;
    others by launches of their own and one for the gate.
    """
    factors = up.members[0] if len(up.members) == 1 else None
    if isinstance(factors, FusedFactors) and _in_one_launch(x, norm is not None, factors, activation):
        return _fused(x, norm, factors, up.gate, activation)
    entering = normed(x, norm)
    if isinstance(factors, FusedFactors) and _in_one_launch(x, False, factors, activation):
        return _fused(entering, None, factors, up.gate, activation)
    if _dense_in_one_launch(x, up, activation):
        weights, biases = [member.weight for member in up.members if isinstance(member, Dense)], _biases(up)
        rows, mode = entering.reshape(-1, x.shape[-1]), mode_of(x.dtype, allow_tf32=tf32_allowed())
        y = torch.ops.flysurgery.dense_gated(rows, weights, biases, up.gate, activation, mode)
        return y.view(*x.shape[:-1], y.shape[-1])
    outputs = [multiplied(entering, member) for member in up.members]
    parts = outputs if len(outputs) == 2 else outputs[0].chunk(2, dim=-1)
    gate, value = (part.flatten(0, -2) for part in (parts[up.gate], parts[1 - up.gate]))
    return torch.ops.flysurgery.gated(gate, value, activation).view(*x.shape[:-1], gate.shape[-1])


def gated_launches(x: Tensor, norm: Norm | None, up: Gated, activation: str) -> tuple[str, ...]:
    """What the launches of ``gated_hidden`` compute, one after the other; a product of factors may take one for each."""
    factors = up.members[0] if len(up.members) == 1 else None
    if isinstance(factors, FusedFactors) and _in_one_launch(x, norm is not None, factors, activation):
        return ("gate and value" if norm is None else "norm, gate and value",)
    before = () if norm is None else ("norm",)
    fused = isinstance(factors, FusedFactors) and _in_one_launch(x, False, factors, activation)
    if fused or _dense_in_one_launch(x, up, activation):
        return (*before, "gate and value")
    return (*before, *(("gate", "value") if len(up.members) == 2 else ("both halves",)), "their product")


def _fused(x: Tensor, norm: Norm | None, both: FusedFactors, gate: int, activation: str) -> Tensor:
    parts = (None, None, None) if norm is None else (norm.weight, norm.bias, norm.eps)
    rows, mode = x.reshape(-1, x.shape[-1]), mode_of(x.dtype, allow_tf32=tf32_allowed())
    y = torch.ops.flysurgery.gated_linear(rows, *parts, list(both.factors), both.bias, gate, activation, mode)
    return y.view(*x.shape[:-1], y.shape[-1])


def _in_one_launch(x: Tensor, norm: bool, both: FusedFactors, activation: str) -> bool:
    """Whether the fused kernel takes a layer whose outputs are gate and value, and the norm before it where there is one."""
    mode, shapes = mode_of(x.dtype, allow_tf32=tf32_allowed()), tuple(tuple(factor.shape) for factor in both.factors)
    return mode is not None and _gated_linear_obstacle(shapes, mode, activation, norm, x.device.index) is None


def _dense_in_one_launch(x: Tensor, up: Gated, activation: str) -> bool:
    """Whether the dense kernel takes the layers, and is the fastest: dense ones, with a bias each or none."""
    mode, dense = mode_of(x.dtype, allow_tf32=tf32_allowed()), all(isinstance(member, Dense) for member in up.members)
    if not dense or mode is None or len(_biases(up)) not in (0, len(up.members)):
        return False
    return _dense_gated_obstacle(up.sizes[0], 2 * up.sizes[1], mode, activation, x.device.index) is None


def _biases(up: Gated) -> list[Tensor]:
    return [member.bias for member in up.members if member.bias is not None]


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


@torch.compiler.assume_constant_result
def _gated_linear_obstacle(shapes: tuple[tuple[int, ...], ...], mode: str, activation: str, norm: bool, device_index: int) -> str | None:
    return device_obstacle(device_index) or gated_linear_obstacle(Architecture.of(*shapes), mode, activation, norm, device_index)


@torch.compiler.assume_constant_result
def _dense_gated_obstacle(inputs: int, outputs: int, mode: str, activation: str, device_index: int) -> str | None:
    obstacle = device_obstacle(device_index) or dense_obstacle(inputs, outputs, mode, activation, device_index, gated=True)
    return obstacle or dense_advice(inputs, outputs, mode, device_index, gated=True)
