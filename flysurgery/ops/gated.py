"""The hidden units of a gated feed-forward block: an activated gate times a value, both made of the same normed input."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear as torch_linear

from flysurgery.ops.cuda.dense import dense_advice, dense_gated_operator, dense_obstacle
from flysurgery.ops.cuda.device import device_obstacle
from flysurgery.ops.cuda.gated import gated_obstacle, gated_operator
from flysurgery.ops.cuda.gated_linear import gated_linear_obstacle, gated_linear_operator
from flysurgery.ops.cuda.modes import present_mode
from flysurgery.ops.multiply import ks_linear
from flysurgery.ops.normed import normed
from flysurgery.ops.parts import Dense, FusedFactors, Gated, Linear, Norm
from flysurgery.ops.stage import Stage
from flysurgery.patterns import Architecture


def gated_stages(x: Tensor, norm: Norm | None, up: Gated, activation: str) -> tuple[Stage, ...] | str:
    """How ``activation(gate(norm(x))) * value(norm(x))`` is computed, the fastest way first, or why no kernel takes it.

    One launch for factors whose outputs are both, with the norm where that fits as well, and one for dense layers behind the norm's;
    others by launches of their own and one for the gate. Whether x and the norm fit the layers is not asked here.
    """
    outputs = [member.sizes[1] for member in up.members]
    if len(outputs) not in (1, 2) or outputs[0] != outputs[-1] or sum(outputs) % 2:
        return f"expected two layers for gate and value with as many outputs, or one whose outputs are both, got {outputs} outputs"
    obstacle = _gated_obstacle(up.sizes[1], x.dtype, activation)
    if obstacle is not None:
        return obstacle
    before = () if norm is None else (Stage(("norm",), lambda y, x, block: normed(y, block.norm)),)
    both = up.members[0] if len(up.members) == 1 else None
    if isinstance(both, FusedFactors):
        if _in_one_launch(x, norm is not None, both, activation):
            launch = "gate and value" if norm is None else "norm, gate and value"
            return (Stage((launch,), lambda y, x, block: _fused(y, block.norm, block.up, block.activation)),)
        if _in_one_launch(x, False, both, activation):
            return *before, Stage(("gate and value",), lambda y, x, block: _fused(y, None, block.up, block.activation))
    if _dense_in_one_launch(x, up, activation):
        return *before, Stage(("gate and value",), lambda y, x, block: _dense(y, block.up, block.activation))
    products = ("gate", "value") if len(up.members) == 2 else ("both halves",)  # a product of factors may take a launch for each
    return *before, Stage((*products, "their product"), lambda y, x, block: _apart(y, block.up, block.activation))


def _fused(x: Tensor, norm: Norm | None, up: Gated, activation: str) -> Tensor:
    (both,) = up.members
    assert isinstance(both, FusedFactors), "the stages say so"
    parts = (None, None, None) if norm is None else (norm.weight, norm.bias, norm.eps)
    rows, mode = x.reshape(-1, x.shape[-1]), present_mode(x.dtype)
    y = gated_linear_operator(rows, *parts, list(both.factors), both.bias, up.gate, activation, mode)
    return y.view(*x.shape[:-1], y.shape[-1])


def _dense(x: Tensor, up: Gated, activation: str) -> Tensor:
    weights, rows = [member.weight for member in up.members if isinstance(member, Dense)], x.reshape(-1, x.shape[-1])
    y = dense_gated_operator(rows, weights, _biases(up), up.gate, activation, present_mode(x.dtype))
    return y.view(*x.shape[:-1], y.shape[-1])


def _apart(x: Tensor, up: Gated, activation: str) -> Tensor:
    outputs = [multiplied(x, member) for member in up.members]
    parts = outputs if len(outputs) == 2 else outputs[0].chunk(2, dim=-1)
    gate, value = (part.flatten(0, -2) for part in (parts[up.gate], parts[1 - up.gate]))
    return gated_operator(gate, value, activation).view(*x.shape[:-1], gate.shape[-1])


def _in_one_launch(x: Tensor, norm: bool, both: FusedFactors, activation: str) -> bool:
    """Whether the fused kernel takes a layer whose outputs are gate and value, and the norm before it where there is one."""
    mode = present_mode(x.dtype)
    return mode is not None and _gated_linear_obstacle(both.shapes, mode, activation, norm, x.device.index) is None


def _dense_in_one_launch(x: Tensor, up: Gated, activation: str) -> bool:
    """Whether the dense kernel takes the layers, and is the fastest: dense ones, with a bias each or none."""
    mode, dense = present_mode(x.dtype), all(isinstance(member, Dense) for member in up.members)
    if not dense or mode is None or len(_biases(up)) not in (0, len(up.members)):
        return False
    return _dense_gated_obstacle(up.sizes[0], 2 * up.sizes[1], mode, activation, x.device.index) is None


def _biases(up: Gated) -> list[Tensor]:
    return [member.bias for member in up.members if member.bias is not None]


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
