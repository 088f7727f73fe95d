"""Linears of few rows, dense or of factors, with the norm before them and an epilogue behind, in one launch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flysurgery.ops.cuda.device import device_obstacle
from flysurgery.ops.cuda.few_rows import few_rows_operator, most_rows
from flysurgery.ops.parts import FusedFactors, Linear, Norm


def takes_few_rows(x: Tensor, group: Sequence[Linear], norm: Norm | None = None, activation: str = "none") -> bool:
    """Whether x has few rows, and their kernel takes the linears side by side. Whether sizes fit each other is not asked here."""
    if not x.is_cuda:
        return False
    inputs, outputs = group[0].sizes[0], sum(member.sizes[1] for member in group)
    return 0 < x.numel() <= _most_rows(inputs, outputs, norm is not None, activation, x.dtype, x.device.index) * x.shape[-1]


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
    y = few_rows_operator(
        x.reshape(-1, x.shape[-1]),
        *((None, None, None) if norm is None else (norm.weight, norm.bias, norm.eps)),
        weights,
        [len(each) for each in factors],
        [member.bias for member in group],
        activation,
        None if residual is None else residual.reshape(-1, residual.shape[-1]),
        scale,
    )
    return y.view(*x.shape[:-1], y.shape[-1])


@torch.compiler.assume_constant_result  # depends on the machine and the arguments alone
def _most_rows(inputs: int, outputs: int, norm: bool, activation: str, dtype: torch.dtype, device_index: int) -> int:
    return 0 if device_obstacle(device_index) else most_rows(inputs, outputs, norm, activation, dtype, device_index)
