"""What one launch computes: why no kernel takes it, and the call. Sizes have been checked to fit each other, and dtype and device."""

from collections.abc import Callable, Sequence

from torch import Tensor
from torch.nn import functional

from flysurgery.gpu.dense import dense_obstacle, run_dense
from flysurgery.gpu.device import shared_limit_of
from flysurgery.gpu.few_rows import most_rows, most_some_rows, run_few_rows
from flysurgery.gpu.ffn import ffn_obstacle
from flysurgery.gpu.fused_linear import fused_reason, run_fused_linears
from flysurgery.gpu.layer_norm import layer_norm_obstacle, run_layer_norm
from flysurgery.gpu.modes import mode_for
from flysurgery.gpu.operands import Dense, FusedFactors, Linear, Norm
from flysurgery.ops.multiply import ks_linear


def multiplied(x: Tensor, linear: Linear | Callable[[Tensor], Tensor]) -> Tensor:
    """A linear without epilogue, by PyTorch, by the backend that ``ks_linear`` chooses, or by its own module."""
    if isinstance(linear, Dense):
        return functional.linear(x, linear.weight.flatten(1), linear.bias)
    return ks_linear(x, linear.factors, linear.bias) if isinstance(linear, FusedFactors) else linear(x)


def norm_reason(x: Tensor, norm: Norm | None, features: int) -> str | None:
    """Why no kernel takes a norm of this many features; None where one does, or there is no norm."""
    return None if norm is None else layer_norm_obstacle(features, x.dtype)


def normed(x: Tensor, norm: Norm) -> Tensor:  # shape: (*batch, features)
    """The norm of x."""
    return run_layer_norm(rows_of(x), norm.weight, norm.bias, norm.eps).view(x.shape)


def in_one_launch(x: Tensor, group: Sequence[FusedFactors], *, norm: bool = True, gated: bool = False) -> bool:
    """Whether ``fused`` takes linears with their norm or without one; gated: one linear, whose outputs are gate and value."""
    limit = shared_limit_of(x.device.index)
    return alike(group) and fused_reason(group[0].architecture, mode_for(x), len(group), limit, norm=norm, gated=gated) is None


def alike(group: Sequence[FusedFactors]) -> bool:
    """Whether linears are of one architecture, with a bias each or none."""
    return len({(member.architecture, member.bias is None) for member in group}) == 1


def fused(
    x: Tensor,  # shape: (*batch, in_features)
    norm: Norm | None,
    group: Sequence[FusedFactors],
    activation: str = "none",
    gate: int | None = None,
    residual: Tensor | None = None,  # shape: (*batch, sum of all out_features)
    scale: Tensor | None = None,  # shape: (sum of all out_features,)
) -> Tensor:  # shape: (*batch, sum of all out_features), half of them where gated
    """``residual + activation(scale * linears(norm(x)))``, the linears' outputs side by side, or ``activation(gate) * value``."""
    return run_fused_linears(x, norm, group, gate, activation, residual, scale, mode_for(x))


def epilogue_reason(x: Tensor, linear: Linear, *, fast: bool = False) -> str | None:
    """Why no kernel runs a linear with its epilogue; None where one does.

    ``fast``: also where PyTorch's product and a launch for the rest are faster.
    """
    if isinstance(linear, Dense):
        return dense_obstacle(*linear.sizes, mode_for(x), x.device.index, fast=fast)
    return fused_reason(linear.architecture, mode_for(x), 1, shared_limit_of(x.device.index))


def linear_epilogue(
    x: Tensor,  # shape: (*batch, in_features)
    linear: Linear,
    activation: str = "none",
    residual: Tensor | None = None,  # shape: (*batch, out_features)
    scale: Tensor | None = None,  # shape: (out_features,)
) -> Tensor:  # shape: (*batch, out_features)
    """``residual + activation(scale * linear(x))``, where ``epilogue_reason`` is None."""
    if isinstance(linear, FusedFactors):
        return fused(x, None, (linear,), activation, None, residual, scale)
    added = None if residual is None else rows_of(residual)
    return like(x, run_dense(rows_of(x), linear, activation, added, scale, mode_for(x)))


def takes_few_rows(x: Tensor, group: Sequence[Linear], norm: Norm | None = None) -> bool:
    """Whether x has so few rows that a kernel for these takes the linears side by side, and is the fastest."""
    if _in_registers(x, group, norm):
        return True
    factors = any(isinstance(member, FusedFactors) for member in group)
    return norm is None and 0 < x.numel() <= most_some_rows(*_sizes(group), factors, mode_for(x), x.device.index) * x.shape[-1]


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
    mode = None if _in_registers(x, group, norm) else mode_for(x)
    return like(x, run_few_rows(rows, norm, group, activation, added, scale, mode))


def _in_registers(x: Tensor, group: Sequence[Linear], norm: Norm | None) -> bool:
    """Whether x has so few rows that all blocks of the kernel whose operands lie in registers run at once."""
    return 0 < x.numel() <= most_rows(*_sizes(group), norm is not None, x.dtype, x.device.index) * x.shape[-1]


def _sizes(group: Sequence[Linear]) -> tuple[int, int]:
    return group[0].sizes[0], sum(member.sizes[1] for member in group)


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
