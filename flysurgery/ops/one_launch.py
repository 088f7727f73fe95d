"""What one launch computes: whether a kernel takes it, and the call. Sizes have been checked to fit each other, and dtype and device."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor
from torch.nn import functional

from flysurgery.gpu.dense import dense_obstacle, run_dense, run_dense_gated
from flysurgery.gpu.device import shared_limit_of
from flysurgery.gpu.few_rows import most_rows, run_few_rows
from flysurgery.gpu.ffn import ffn_obstacle
from flysurgery.gpu.fused_linear import fused_reason, run_fused_linears
from flysurgery.gpu.gated import run_gated
from flysurgery.gpu.layer_norm import layer_norm_obstacle, run_layer_norm
from flysurgery.gpu.modes import mode_for
from flysurgery.gpu.parts import Dense, FusedFactors, Gated, Linear, Norm
from flysurgery.gpu.some_rows import most_some_rows, run_some_rows
from flysurgery.ops.multiply import ks_linear


def multiplied(x: Tensor, linear: Linear | Callable[[Tensor], Tensor]) -> Tensor:
    """A linear without epilogue, by PyTorch, by the backend that ``ks_linear`` chooses, or by its own module."""
    if isinstance(linear, Dense):
        return functional.linear(x, linear.weight.flatten(1), linear.bias)
    return ks_linear(x, linear.factors, linear.bias) if isinstance(linear, FusedFactors) else linear(x)


def normed(
    x: Tensor,  # shape: (*batch, features)
    norm: Norm | None,
) -> Tensor:  # shape: (*batch, features)
    """The norm of x; x itself where there is none."""
    return x if norm is None else run_layer_norm(rows_of(x), norm.weight, norm.bias, norm.eps).view(x.shape)


def norm_reason(x: Tensor, norm: Norm | None, features: int) -> str | None:
    """Why no kernel takes a norm of this many features; None where one does, or there is no norm."""
    return None if norm is None else layer_norm_obstacle(features, x.dtype)


def linear_epilogue(
    x: Tensor,  # shape: (*batch, in_features)
    linear: Linear,
    activation: str = "none",
    residual: Tensor | None = None,  # shape: (*batch, out_features)
    scale: Tensor | None = None,  # shape: (out_features,)
) -> Tensor:  # shape: (*batch, out_features)
    """``residual + activation(scale * linear(x))``, where ``epilogue_reason`` is None."""
    added = None if residual is None else rows_of(residual)
    if isinstance(linear, Dense):
        return like(x, run_dense(rows_of(x), linear, activation, added, scale, mode_for(x)))
    return like(x, run_fused_linears(rows_of(x), None, (linear,), None, activation, added, scale, mode_for(x)))


def epilogue_reason(x: Tensor, linear: Linear, *, fast: bool = False) -> str | None:
    """Why no kernel runs a linear with its epilogue; None where one does.

    ``fast``: also where PyTorch's product and a launch for the rest are faster.
    """
    if isinstance(linear, Dense):
        return dense_obstacle(*linear.sizes, mode_for(x), x.device.index, fast=fast)
    return fused_reason(linear.architecture, mode_for(x), 1, shared_limit_of(x.device.index))


def fused_norm_linear(
    x: Tensor,  # shape: (*batch, in_features)
    norm: Norm,
    group: Sequence[FusedFactors],
    activation: str,
) -> Tensor:  # shape: (*batch, sum of all out_features)
    """A norm and activated linears of one architecture, their outputs side by side, where ``in_one_launch`` holds."""
    return run_fused_linears(x, norm, group, None, activation, None, None, mode_for(x))


def in_one_launch(x: Tensor, group: Sequence[FusedFactors], *, norm: bool = True) -> bool:
    """Whether the fused kernel takes linears with their norm, or without one."""
    limit = shared_limit_of(x.device.index)
    return alike(group) and fused_reason(group[0].architecture, mode_for(x), len(group), limit, norm=norm) is None


def alike(group: Sequence[FusedFactors]) -> bool:
    """Whether linears are of one architecture, with a bias each or none."""
    return len({(member.architecture, member.bias is None) for member in group}) == 1


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
    rows, added = rows_of(x), None if residual is None else rows_of(residual)
    if _has_fewest(x, group, norm):
        return like(x, run_few_rows(rows, norm, group, activation, added, scale))
    return like(x, run_some_rows(rows, group, activation, added, scale, mode_for(x)))


def takes_few_rows(x: Tensor, group: Sequence[Linear], norm: Norm | None = None) -> bool:
    """Whether x has few rows, and a kernel takes the linears side by side."""
    return _has_fewest(x, group, norm) or (norm is None and _has_some(x, group))


def _has_fewest(x: Tensor, group: Sequence[Linear], norm: Norm | None) -> bool:
    """Whether x has so few rows that all blocks of the kernel whose operands lie in registers run at once."""
    return 0 < x.numel() <= most_rows(*_sizes(group), norm is not None, x.dtype, x.device.index) * x.shape[-1]


def _has_some(x: Tensor, group: Sequence[Linear]) -> bool:
    """Whether x has so few rows that the kernel which cuts rows, columns and inputs is the fastest."""
    factors = any(isinstance(member, FusedFactors) for member in group)
    return 0 < x.numel() <= most_some_rows(*_sizes(group), factors, mode_for(x), x.device.index) * x.shape[-1]


def _sizes(group: Sequence[Linear]) -> tuple[int, int]:
    return group[0].sizes[0], sum(member.sizes[1] for member in group)


def gated_apart(x: Tensor, up: Gated, activation: str) -> Tensor:
    """``activation(gate) * value``: a launch for each layer, and one for the gate."""
    outputs = [multiplied(x, member) for member in up.members]
    parts = outputs if len(outputs) == 2 else outputs[0].chunk(2, dim=-1)
    return like(x, run_gated(rows_of(parts[up.gate]), rows_of(parts[1 - up.gate]), activation))


def gated_factors(x: Tensor, norm: Norm | None, up: Gated, activation: str) -> Tensor:
    """``activation(gate) * value`` of one layer of factors, with the norm before it where there is one, if ``takes_gated_factors``."""
    (both,) = up.members
    assert isinstance(both, FusedFactors), "the stages say so"
    return like(x, run_fused_linears(rows_of(x), norm, (both,), up.gate, activation, None, None, mode_for(x)))


def takes_gated_factors(x: Tensor, norm: bool, both: FusedFactors) -> bool:
    """Whether the fused kernel takes a layer whose outputs are gate and value, and the norm before it where there is one."""
    limit = shared_limit_of(x.device.index)
    return fused_reason(both.architecture, mode_for(x), 1, limit, norm=norm, gated=True) is None


def gated_dense(x: Tensor, up: Gated, activation: str) -> Tensor:
    """``activation(gate) * value`` of dense layers, where ``takes_gated_dense`` holds."""
    weights = [member.weight for member in up.members if isinstance(member, Dense)]
    return like(x, run_dense_gated(rows_of(x), weights, _biases(up), up.gate, activation, mode_for(x)))


def takes_gated_dense(x: Tensor, up: Gated) -> bool:
    """Whether the dense kernel takes the layers, and is the fastest: dense ones, with a bias each or none."""
    if not all(isinstance(member, Dense) for member in up.members) or len(_biases(up)) not in (0, len(up.members)):
        return False
    inputs, outputs = up.sizes
    return dense_obstacle(inputs, 2 * outputs, mode_for(x), x.device.index, gated=True, fast=True) is None


def _biases(up: Gated) -> list[Tensor]:
    return [member.bias for member in up.members if member.bias is not None]


def whole_reason(x: Tensor, norm: Norm | None, up: Linear, down: Linear) -> str | None:
    """Why no kernel takes a whole feed-forward block; None where one does."""
    if isinstance(up, Dense) or isinstance(down, Dense):
        return "the kernel of a whole block multiplies factors, and one of its layers is dense"
    return ffn_obstacle(up.architecture, down.architecture, mode_for(x), norm is not None, shared_limit_of(x.device.index))


def rows_of(x: Tensor) -> Tensor:
    """x with all leading dimensions together."""
    return x.reshape(-1, x.shape[-1])


def like(x: Tensor, y: Tensor) -> Tensor:
    """The rows of y with the leading dimensions of x."""
    return y.view(*x.shape[:-1], y.shape[-1])
