"""Linears of few rows, dense or of factors that are multiplied out, with an epilogue and perhaps a norm before them, in one launch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flysurgery.ops.cuda.device import device_obstacle
from flysurgery.ops.cuda.few_rows import few_rows_operator, most_rows
from flysurgery.ops.cuda.modes import present_mode
from flysurgery.ops.cuda.some_rows import most_some_rows, some_rows_operator
from flysurgery.ops.parts import FusedFactors, Linear, Norm


def takes_few_rows(x: Tensor, group: Sequence[Linear], norm: Norm | None = None, activation: str = "none") -> bool:
    """Whether x has few rows, and a kernel takes the linears side by side. Whether sizes fit each other is not asked here."""
    return _has_fewest(x, group, norm, activation) or (norm is None and _has_some(x, group, activation))


def few_rows_linear(
    x: Tensor,  # shape: (*batch, in_features)
    norm: Norm | None,
    group: Sequence[Linear],
    activation: str = "none",
    residual: Tensor | None = None,  # shape: (*batch, sum of all out_features)
    scale: Tensor | None = None,  # shape: (sum of all out_features,)
) -> Tensor:  # shape: (*batch, sum of all out_features)
    """``residual + activation(scale * linears(norm(x)))``, the linears' outputs side by side, where ``takes_few_rows``."""
    factors = [member.factors if isinstance(member, FusedFactors) else () for member in group]
    weights = [part for member in group for part in (member.factors if isinstance(member, FusedFactors) else (member.weight,))]
    rows, added = x.reshape(-1, x.shape[-1]), None if residual is None else residual.reshape(-1, residual.shape[-1])
    linears = weights, [len(each) for each in factors], [member.bias for member in group]
    if _has_fewest(x, group, norm, activation):
        parts = (None, None, None) if norm is None else (norm.weight, norm.bias, norm.eps)
        y = few_rows_operator(rows, *parts, *linears, activation, added, scale)
    else:
        y = some_rows_operator(rows, *linears, activation, added, scale, present_mode(x.dtype))
    return y.view(*x.shape[:-1], y.shape[-1])


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


@torch.compiler.assume_constant_result  # depends on the machine and the arguments alone
def _most_rows(inputs: int, outputs: int, norm: bool, activation: str, dtype: torch.dtype, device_index: int) -> int:
    return 0 if device_obstacle(device_index) else most_rows(inputs, outputs, norm, activation, dtype, device_index)


@torch.compiler.assume_constant_result
def _most_some_rows(inputs: int, outputs: int, factors: bool, activation: str, mode: str, device_index: int) -> int:
    return 0 if device_obstacle(device_index) else most_some_rows(inputs, outputs, factors, activation, mode, device_index)
