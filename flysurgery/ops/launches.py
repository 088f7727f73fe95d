"""What one launch computes: whether a kernel takes it, and the call. Sizes have been checked to fit each other."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from flysurgery.gpu.dense import dense_advice, dense_gated_operator, dense_linear_operator, dense_obstacle
from flysurgery.gpu.device import device_obstacle
from flysurgery.gpu.few_rows import few_rows_operator, most_rows
from flysurgery.gpu.ffn import ffn_obstacle, ffn_operator
from flysurgery.gpu.fused_linears import fused_linears_obstacle, fused_linears_operator
from flysurgery.gpu.gated import gated_obstacle, gated_operator
from flysurgery.gpu.layer_norm import layer_norm_obstacle, layer_norm_operator
from flysurgery.gpu.modes import present_mode
from flysurgery.gpu.some_rows import most_some_rows, some_rows_operator
from flysurgery.ops.multiply import ks_linear
from flysurgery.ops.parts import Dense, FusedFactors, Gated, Linear, Norm
from flysurgery.patterns import Architecture

Shapes = tuple[tuple[int, ...], ...]

# A compiler takes the answers as constants: they depend on the machine and the arguments alone.
constant = torch.compiler.assume_constant_result


def multiplied(x: Tensor, linear: Linear) -> Tensor:
    """A linear without epilogue, by PyTorch or by the backend that ``ks_linear`` chooses."""
    if isinstance(linear, Dense):
        return functional.linear(x, linear.weight.flatten(1), linear.bias)
    return ks_linear(x, linear.factors, linear.bias)


def normed(
    x: Tensor,  # shape: (*batch, features)
    norm: Norm | None,
) -> Tensor:  # shape: (*batch, features)
    """The norm of x; x itself where there is none."""
    return x if norm is None else layer_norm_operator(_rows(x), norm.weight, norm.bias, norm.eps).view(x.shape)


def norm_reason(norm: Norm | None, features: int, dtype: torch.dtype) -> str | None:
    """Why no kernel takes a norm of this many features; None where one does, or there is no norm."""
    return None if norm is None else _layer_norm_obstacle(features, dtype)


@constant
def _layer_norm_obstacle(features: int, dtype: torch.dtype) -> str | None:
    return device_obstacle() or layer_norm_obstacle(features, dtype)


def linear_epilogue(
    x: Tensor,  # shape: (*batch, in_features)
    linear: Linear,
    activation: str = "none",
    residual: Tensor | None = None,  # shape: (*batch, out_features)
    scale: Tensor | None = None,  # shape: (out_features,)
) -> Tensor:  # shape: (*batch, out_features)
    """``residual + activation(scale * linear(x))``, where ``epilogue_reason`` is None."""
    mode, added = present_mode(x.dtype), None if residual is None else _rows(residual)
    if isinstance(linear, Dense):
        return _like(x, dense_linear_operator(_rows(x), linear.weight, linear.bias, activation, added, scale, mode))
    return _like(x, _fused(_rows(x), None, (linear,), None, activation, added, scale))


def epilogue_reason(linear: Linear, dtype: torch.dtype, device: torch.device, activation: str = "none") -> str | None:
    """Why no kernel runs a linear with this epilogue; None where one does."""
    mode = present_mode(dtype)
    if mode is None:
        return f"the fused operators take float32, float16 and bfloat16, not {dtype}"
    if isinstance(linear, Dense):
        return _dense_obstacle(*linear.sizes, mode, activation, device.index)
    return _fused_obstacle(linear.shapes, mode, 1, activation, False, False, device.index)


@constant
def _dense_obstacle(inputs: int, outputs: int, mode: str, activation: str, device_index: int) -> str | None:
    return device_obstacle(device_index) or dense_obstacle(inputs, outputs, mode, activation, device_index)


@constant
def _fused_obstacle(shapes: Shapes, mode: str, linears: int, activation: str, norm: bool, gated: bool, device_index: int) -> str | None:
    obstacle = device_obstacle(device_index)
    return obstacle or fused_linears_obstacle(Architecture.of(*shapes), mode, linears, activation, norm, gated, device_index)


def _fused(
    x: Tensor,  # shape: (rows, in_features)
    norm: Norm | None,
    group: Sequence[FusedFactors],
    gate: int | None,
    activation: str,
    residual: Tensor | None = None,  # shape: (rows, sum of all out_features)
    scale: Tensor | None = None,  # shape: (sum of all out_features,)
) -> Tensor:  # shape: (rows, sum of all out_features), half of them where gated
    factors, biases = [factor for member in group for factor in member.factors], [m.bias for m in group if m.bias is not None]
    return fused_linears_operator(x, *_parts(norm), factors, biases, gate, activation, residual, scale, present_mode(x.dtype))


def epilogue_pays(linear: Linear, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether a kernel adds to the residual in the linear's launch, and is faster than PyTorch's product and a launch for the rest."""
    if epilogue_reason(linear, dtype, device) is not None:
        return False
    return not isinstance(linear, Dense) or _dense_advice(*linear.sizes, present_mode(dtype) or "", device.index) is None


@constant
def _dense_advice(inputs: int, outputs: int, mode: str, device_index: int) -> str | None:
    return dense_advice(inputs, outputs, mode, device_index)


def fused_norm_linear(
    x: Tensor,  # shape: (*batch, in_features)
    norm: Norm,
    group: Sequence[FusedFactors],
    activation: str,
) -> Tensor:  # shape: (*batch, sum of all out_features)
    """A norm and activated linears of one architecture, their outputs side by side, where ``in_one_launch`` holds."""
    return _fused(x, norm, group, None, activation)


def in_one_launch(x: Tensor, group: Sequence[FusedFactors]) -> bool:
    """Whether the fused kernel takes linears with their norm."""
    mode = present_mode(x.dtype)
    if mode is None or not alike(group):
        return False
    return _fused_obstacle(group[0].shapes, mode, len(group), "none", True, False, x.device.index) is None


def alike(group: Sequence[FusedFactors]) -> bool:
    """Whether linears are of one architecture, with a bias each or none."""
    if not group:
        return False
    shapes, biased = group[0].shapes, group[0].bias is not None
    return all(member.shapes == shapes and (member.bias is not None) == biased for member in group)


def few_rows_linear(
    x: Tensor,  # shape: (*batch, in_features)
    norm: Norm | None,
    group: Sequence[Linear],
    activation: str = "none",
    residual: Tensor | None = None,  # shape: (*batch, sum of all out_features)
    scale: Tensor | None = None,  # shape: (sum of all out_features,)
) -> Tensor:  # shape: (*batch, sum of all out_features)
    """``residual + activation(scale * linears(norm(x)))``, the linears' outputs side by side, where ``takes_few_rows`` holds.

    Factors are multiplied out when they are packed; dense layers stay.
    """
    weights = [part for member in group for part in (member.factors if isinstance(member, FusedFactors) else (member.weight,))]
    lengths = [len(member.factors) if isinstance(member, FusedFactors) else 0 for member in group]
    rows, added, biases = _rows(x), None if residual is None else _rows(residual), [member.bias for member in group]
    if _has_fewest(x, group, norm, activation):
        return _like(x, few_rows_operator(rows, *_parts(norm), weights, lengths, biases, activation, added, scale))
    return _like(x, some_rows_operator(rows, weights, lengths, biases, activation, added, scale, present_mode(x.dtype)))


def takes_few_rows(x: Tensor, group: Sequence[Linear], norm: Norm | None = None, activation: str = "none") -> bool:
    """Whether x has few rows, and a kernel takes the linears side by side."""
    return _has_fewest(x, group, norm, activation) or (norm is None and _has_some(x, group, activation))


def _has_fewest(x: Tensor, group: Sequence[Linear], norm: Norm | None, activation: str) -> bool:
    """Whether x has so few rows that all blocks of the kernel whose operands lie in registers run at once."""
    if not x.is_cuda:
        return False
    most = _most_rows(*_sizes(group), norm is not None, activation, x.dtype, x.device.index)
    return 0 < x.numel() <= most * x.shape[-1]


def _has_some(x: Tensor, group: Sequence[Linear], activation: str) -> bool:
    """Whether x has so few rows that the kernel which cuts rows, columns and inputs is the fastest."""
    mode = present_mode(x.dtype)
    if not x.is_cuda or mode is None:
        return False
    most = _most_some_rows(*_sizes(group), any(isinstance(member, FusedFactors) for member in group), activation, mode, x.device.index)
    return 0 < x.numel() <= most * x.shape[-1]


def _sizes(group: Sequence[Linear]) -> tuple[int, int]:
    return group[0].sizes[0], sum(member.sizes[1] for member in group)


@constant
def _most_rows(inputs: int, outputs: int, norm: bool, activation: str, dtype: torch.dtype, device_index: int) -> int:
    return 0 if device_obstacle(device_index) else most_rows(inputs, outputs, norm, activation, dtype, device_index)


@constant
def _most_some_rows(inputs: int, outputs: int, factors: bool, activation: str, mode: str, device_index: int) -> int:
    return 0 if device_obstacle(device_index) else most_some_rows(inputs, outputs, factors, activation, mode, device_index)


def gated_apart(x: Tensor, up: Gated, activation: str) -> Tensor:
    """``activation(gate) * value``: a launch for each layer, and one for the gate."""
    outputs = [multiplied(x, member) for member in up.members]
    parts = outputs if len(outputs) == 2 else outputs[0].chunk(2, dim=-1)
    return _like(x, gated_operator(_rows(parts[up.gate]), _rows(parts[1 - up.gate]), activation))


def gated_reason(up: Gated, dtype: torch.dtype, activation: str) -> str | None:
    """Why no kernel multiplies the activated gate and the value; None where one does."""
    return _gated_obstacle(up.sizes[1], dtype, activation)


@constant
def _gated_obstacle(features: int, dtype: torch.dtype, activation: str) -> str | None:
    return device_obstacle() or gated_obstacle(features, dtype, activation)


def gated_factors(x: Tensor, norm: Norm | None, up: Gated, activation: str) -> Tensor:
    """``activation(gate) * value`` of one layer of factors, with the norm before it where there is one, if ``takes_gated_factors``."""
    (both,) = up.members
    assert isinstance(both, FusedFactors), "the stages say so"
    return _like(x, _fused(_rows(x), norm, (both,), up.gate, activation))


def takes_gated_factors(x: Tensor, norm: bool, both: FusedFactors, activation: str) -> bool:
    """Whether the fused kernel takes a layer whose outputs are gate and value, and the norm before it where there is one."""
    mode = present_mode(x.dtype)
    return mode is not None and _fused_obstacle(both.shapes, mode, 1, activation, norm, True, x.device.index) is None


def gated_dense(x: Tensor, up: Gated, activation: str) -> Tensor:
    """``activation(gate) * value`` of dense layers, where ``takes_gated_dense`` holds."""
    weights = [member.weight for member in up.members if isinstance(member, Dense)]
    return _like(x, dense_gated_operator(_rows(x), weights, _biases(up), up.gate, activation, present_mode(x.dtype)))


def takes_gated_dense(x: Tensor, up: Gated, activation: str) -> bool:
    """Whether the dense kernel takes the layers, and is the fastest: dense ones, with a bias each or none."""
    mode, dense = present_mode(x.dtype), all(isinstance(member, Dense) for member in up.members)
    if not dense or mode is None or len(_biases(up)) not in (0, len(up.members)):
        return False
    return _dense_gated_obstacle(up.sizes[0], 2 * up.sizes[1], mode, activation, x.device.index) is None


def _biases(up: Gated) -> list[Tensor]:
    return [member.bias for member in up.members if member.bias is not None]


@constant
def _dense_gated_obstacle(inputs: int, outputs: int, mode: str, activation: str, device_index: int) -> str | None:
    obstacle = device_obstacle(device_index) or dense_obstacle(inputs, outputs, mode, activation, device_index, gated=True)
    return obstacle or dense_advice(inputs, outputs, mode, device_index, gated=True)


def whole_ffn(
    x: Tensor,  # shape: (*batch, in_features)
    norm: Norm | None,
    up: FusedFactors,
    down: FusedFactors,
    activation: str,
    scale: Tensor | None,  # shape: (out_features,)
    residual: bool,
) -> Tensor:  # shape: (*batch, out_features)
    """``x + scale * down(activation(up(norm(x))))``, where ``whole_reason`` is None; without ``x +`` where ``residual`` is false."""
    layers = list(up.factors), up.bias, list(down.factors), down.bias
    return _like(x, ffn_operator(_rows(x), *_parts(norm), *layers, activation, scale, residual))


def whole_reason(x: Tensor, norm: Norm | None, up: Linear, down: Linear, activation: str, residual: bool) -> str | None:
    """Why no kernel takes a whole feed-forward block; None where one does."""
    if isinstance(up, Dense) or isinstance(down, Dense):
        return "the kernel of a whole block multiplies factors, and one of its layers is dense"
    mode = present_mode(x.dtype)
    return _ffn_obstacle(up.shapes, down.shapes, mode, norm is not None, activation, residual, x.device.index)


@constant
def _ffn_obstacle(up: Shapes, down: Shapes, mode: str | None, norm: bool, activation: str, residual: bool, device_index: int) -> str | None:
    obstacle = device_obstacle(device_index)
    return obstacle or ffn_obstacle(Architecture.of(*up), Architecture.of(*down), mode, norm, activation, residual, device_index)


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def _like(x: Tensor, y: Tensor) -> Tensor:
    """The rows of y with the leading dimensions of x."""
    return y.view(*x.shape[:-1], y.shape[-1])


def _parts(norm: Norm | None) -> tuple[Tensor | None, Tensor | None, float | None]:
    return (None, None, None) if norm is None else (norm.weight, norm.bias, norm.eps)
