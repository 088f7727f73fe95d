"""A linear layer with its layer scale and residual, and why no kernel takes it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from flysurgery.errors import BackendError
from flysurgery.ops.cuda.dense import dense_moments_operator, streamed_for
from flysurgery.ops.cuda.modes import present_mode
from flysurgery.ops.decided import decided
from flysurgery.ops.epilogue import common_obstacle, epilogue_reason, linear_epilogue, wrong_size, wrong_vector
from flysurgery.ops.few_rows import few_rows_linear, takes_few_rows
from flysurgery.ops.parts import Dense, Linear
from flysurgery.ops.stage import Stage, Way


class _Operands(NamedTuple):
    linear: Linear
    residual: Tensor
    scale: Tensor | None


def linear_residual(
    x: Tensor,  # shape: (*batch, in_features)
    linear: Linear,
    residual: Tensor,  # shape: (*batch, out_features)
    scale: Tensor | None = None,  # shape: (out_features,)
) -> Tensor:  # shape: (*batch, out_features)
    """``residual + scale * linear(x)`` in one launch.

    Raises:
        BackendError: no kernel takes this; the message is what ``linear_residual_reason`` answers.
    """
    way = linear_residual_way(x, linear, residual, scale)
    if isinstance(way, str):
        raise BackendError(way)
    return way.run()


def linear_residual_moments(
    x: Tensor,  # shape: (*batch, in_features)
    linear: Dense,
    residual: Tensor,  # shape: (*batch, out_features)
    scale: Tensor | None = None,  # shape: (out_features,)
) -> tuple[Tensor, Tensor]:  # shapes: (*batch, out_features), (rows, parts, 2) float32
    """``linear_residual`` where ``leaves_moments`` holds, and what a norm has to know of the rows of its result.

    That is the mean of each of some parts of a row, of equal size, and the sum of the squares of what differs from it.
    """
    rows, added = x.reshape(-1, x.shape[-1]), residual.reshape(-1, residual.shape[-1])
    mode = present_mode(x.dtype)
    y, moments = dense_moments_operator(rows, linear.weight, linear.bias, added, scale, mode)
    return y.view(residual.shape), moments


def leaves_moments(x: Tensor, linear: Linear, residual: Tensor, scale: Tensor | None = None) -> bool:
    """Whether the kernel that computes ``linear_residual`` can leave the moments of its result's rows behind, at next to no cost."""
    if not isinstance(linear, Dense) or linear_residual_reason(x, linear, residual, scale) is not None:
        return False
    mode, rows = present_mode(x.dtype), residual.numel() // max(1, residual.shape[-1])
    return mode is not None and _streams(rows, *linear.sizes, mode, x.device.index)


def linear_residual_way(x: Tensor, linear: Linear, residual: Tensor, scale: Tensor | None = None) -> Way | str:
    """How ``linear_residual`` computes this, or why no kernel takes it."""
    tensors = (x, *linear.tensors, residual) if scale is None else (x, *linear.tensors, residual, scale)
    stages = decided(lambda: _stages(x, linear, residual, scale), tensors, "linear_residual", linear.form, scale is None)
    return stages if isinstance(stages, str) else Way(stages, x, _Operands(linear, residual, scale))


def linear_residual_reason(x: Tensor, linear: Linear, residual: Tensor, scale: Tensor | None = None) -> str | None:
    """Why no kernel takes this; None where one does."""
    way = linear_residual_way(x, linear, residual, scale)
    return way if isinstance(way, str) else None


def _stages(x: Tensor, linear: Linear, residual: Tensor, scale: Tensor | None) -> tuple[Stage, ...] | str:
    """Which kernel takes this, or why none does."""
    outputs = linear.sizes[1]
    wrong = common_obstacle(x, (*linear.tensors, residual, *(() if scale is None else (scale,))))
    wrong = wrong or wrong_size(x, linear) or wrong_vector(scale, outputs, "scale")
    if wrong is not None:
        return wrong
    expected = (*x.shape[:-1], outputs)
    if residual.shape != expected or residual.dtype != x.dtype:
        return f"expected a residual of shape {expected} and {x.dtype}, got {tuple(residual.shape)} and {residual.dtype}"
    if takes_few_rows(x, (linear,)):
        return (Stage((), lambda y, x, given: few_rows_linear(y, None, (given.linear,), "none", given.residual, given.scale)),)
    reason = epilogue_reason(linear, x.dtype, x.device)
    return reason or (Stage((), lambda y, x, given: linear_epilogue(y, given.linear, "none", given.residual, given.scale)),)


@torch.compiler.assume_constant_result  # depends on the machine and the arguments alone
def _streams(rows: int, inputs: int, outputs: int, mode: str, device_index: int) -> bool:
    return streamed_for(rows, inputs, outputs, mode, device_index) is not None
