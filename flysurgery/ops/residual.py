"""A linear layer with its layer scale and residual, and why no kernel takes it."""

from __future__ import annotations

from torch import Tensor

from flysurgery.errors import BackendError
from flysurgery.ops.epilogue import common_obstacle, epilogue_reason, linear_epilogue, wrong_size, wrong_vector
from flysurgery.ops.few_rows import few_rows_linear, takes_few_rows
from flysurgery.ops.parts import Linear


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
    obstacle = linear_residual_reason(x, linear, residual, scale)
    if obstacle is not None:
        raise BackendError(obstacle)
    if takes_few_rows(x, (linear,)):
        return few_rows_linear(x, None, (linear,), residual=residual, scale=scale)
    return linear_epilogue(x, linear, residual=residual, scale=scale)


def linear_residual_reason(x: Tensor, linear: Linear, residual: Tensor, scale: Tensor | None = None) -> str | None:
    """Why no kernel takes this; None where one does."""
    outputs = linear.sizes[1]
    wrong = common_obstacle(x, (*linear.tensors, residual, *(() if scale is None else (scale,))))
    wrong = wrong or wrong_size(x, linear) or wrong_vector(scale, outputs, "scale")
    if wrong is not None:
        return wrong
    expected = (*x.shape[:-1], outputs)
    if residual.shape != expected or residual.dtype != x.dtype:
        return f"expected a residual of shape {expected} and {x.dtype}, got {tuple(residual.shape)} and {residual.dtype}"
    return None if takes_few_rows(x, (linear,)) else epilogue_reason(linear, x.dtype, x.device)
