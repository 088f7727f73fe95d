"""A feed-forward block with its norm, layer scale and residual, and why no kernel takes it.

``flysurgery.ops.composed`` has the same made of PyTorch's operators, for everything that a reason excludes.
"""

from __future__ import annotations

import torch
from torch import Tensor

import flysurgery.ops.cuda.ffn_operator  # noqa: F401 - registers it
from flysurgery.errors import BackendError
from flysurgery.ops.cuda.dense import dense_advice
from flysurgery.ops.cuda.ffn import ffn_obstacle
from flysurgery.ops.cuda.modes import mode_of, tf32_allowed
from flysurgery.ops.epilogue import common_obstacle, epilogue_reason, linear_epilogue, wrong_size, wrong_vector
from flysurgery.ops.few_rows import few_rows_linear, takes_few_rows
from flysurgery.ops.gated import gated_hidden, gated_launches, gated_reason, multiplied
from flysurgery.ops.norm_linears import fused_norm_linear, in_one_launch
from flysurgery.ops.normed import norm_reason, normed, wrong_norm
from flysurgery.ops.parts import Dense, FusedFactors, Gated, Linear, Norm
from flysurgery.ops.wide import takes_ffn, wide_ffn, wide_ffn_launches
from flysurgery.patterns import Architecture


def ffn(
    x: Tensor,  # shape: (*batch, in_features)
    norm: Norm | None,
    up: Linear | Gated,
    down: Linear,
    activation: str = "gelu",
    scale: Tensor | None = None,  # shape: (out_features,)
    residual: bool = True,
    inner: Norm | None = None,
) -> Tensor:  # shape: (*batch, out_features)
    """``x + scale * down(inner(activation(up(norm(x)))))``, without ``x +`` where ``residual`` is false.

    Where ``up`` is gated, ``activation(gate) * value`` takes the place of the activation. One launch where a kernel takes the whole
    block, two for few rows; else one for the norm and what stands behind it with the activation, or one for each, and one for the last
    layer with scale and residual, behind one for a norm before it; or, of wide layers and many rows, one for each factor and one for the
    norm's moments.
    Intermediates are rounded to the dtype of x where they enter a product or are stored; norm, sums, activation and residual are
    float32. Weights may be wider than x; they are rounded when they are packed, once for each version.

    Raises:
        BackendError: no kernel takes this; the message is what ``ffn_reason`` answers.
    """
    obstacle = ffn_reason(x, norm, up, down, activation, scale, residual, inner)
    if obstacle is not None:
        raise BackendError(obstacle)
    if isinstance(up, FusedFactors | Dense) and _few_rows_twice(x, norm, up, down, activation, inner):
        hidden = few_rows_linear(x, norm, (up,), activation)
        return few_rows_linear(hidden, inner, (down,), residual=x if residual else None, scale=scale)
    if (
        isinstance(up, FusedFactors)
        and isinstance(down, FusedFactors)
        and _whole_obstacle(x, up, down, activation, residual, inner) is None
    ):
        parts = (None, None, None) if norm is None else (norm.weight, norm.bias, norm.eps)
        rows = x.reshape(-1, x.shape[-1])
        y = torch.ops.flysurgery.ffn(rows, *parts, list(up.factors), up.bias, list(down.factors), down.bias, activation, scale, residual)
        return y.view(*x.shape[:-1], y.shape[-1])
    if isinstance(up, FusedFactors) and isinstance(down, FusedFactors) and inner is None and takes_ffn(x, up, down, activation):
        return wide_ffn(x, norm, up, down, activation, scale, residual)
    hidden = gated_hidden(x, norm, up, activation) if isinstance(up, Gated) else _activated(x, norm, up, activation)
    return _added(normed(hidden, inner), down, x if residual else None, scale)


def _activated(x: Tensor, norm: Norm | None, up: Linear, activation: str) -> Tensor:
    """``activation(up(norm(x)))``, in one launch where the fused kernel takes the norm as well."""
    if norm is not None and isinstance(up, FusedFactors) and in_one_launch(x, [up]):
        return fused_norm_linear(x, norm, [up], activation)
    return linear_epilogue(normed(x, norm), up, activation)


def _added(hidden: Tensor, down: Linear, residual: Tensor | None, scale: Tensor | None) -> Tensor:
    """``residual + scale * down(hidden)``, in one launch where there is a kernel for it."""
    if takes_few_rows(hidden, (down,)):
        return few_rows_linear(hidden, None, (down,), residual=residual, scale=scale)
    if _added_in_one_launch(hidden, down):
        return linear_epilogue(hidden, down, residual=residual, scale=scale)
    y = multiplied(hidden, down)
    if scale is None:
        return y if residual is None else residual + y
    scale = scale.to(y.dtype)
    return y * scale if residual is None else torch.addcmul(residual, y, scale)


def _added_in_one_launch(x: Tensor, down: Linear) -> bool:
    """Whether a kernel multiplies and adds to the residual, and is the fastest."""
    if epilogue_reason(down, x.dtype, x.device) is not None:
        return False
    mode = mode_of(x.dtype, allow_tf32=tf32_allowed())
    return not isinstance(down, Dense) or _dense_advice(*down.sizes, mode or "", x.device.index) is None


def ffn_launches(
    x: Tensor,
    norm: Norm | None,
    up: Linear | Gated,
    down: Linear,
    activation: str = "gelu",
    scale: Tensor | None = None,
    residual: bool = True,
    inner: Norm | None = None,
) -> tuple[str, ...]:
    """What the launches of ``ffn`` compute, one after the other, where ``ffn_reason`` has none against it."""
    added = " and ".join([*(["scale"] if scale is not None else []), *(["residual"] if residual else [])])
    last = f"down and {added}" if added else "down"
    if isinstance(up, Gated):
        first = gated_launches(x, norm, up, activation)
    elif _few_rows_twice(x, norm, up, down, activation, inner):
        return ("up and activation" if norm is None else "norm, up and activation", last if inner is None else f"inner norm, {last}")
    elif (
        isinstance(down, FusedFactors)
        and isinstance(up, FusedFactors)
        and _whole_obstacle(x, up, down, activation, residual, inner) is None
    ):
        return ("the whole block",)
    elif isinstance(up, FusedFactors) and isinstance(down, FusedFactors) and inner is None and takes_ffn(x, up, down, activation):
        return wide_ffn_launches(norm, scale, residual)
    elif norm is not None and isinstance(up, FusedFactors) and in_one_launch(x, [up]):
        first = ("norm, up and activation",)
    else:
        first = (*(() if norm is None else ("norm",)), "up and activation")
    before = () if inner is None else ("inner norm",)
    if takes_few_rows(x, (down,)) or _added_in_one_launch(x, down):
        return (*first, *before, last)
    return (*first, *before, "down", *([added] if added else []))


def ffn_reason(
    x: Tensor,
    norm: Norm | None,
    up: Linear | Gated,
    down: Linear,
    activation: str = "gelu",
    scale: Tensor | None = None,
    residual: bool = True,
    inner: Norm | None = None,
) -> str | None:
    """Why no kernel takes this feed-forward block; None where one does. Looks at shapes, dtypes, devices and gradients only."""
    norms = [each for each in (norm, inner) if each is not None]
    tensors = (*up.tensors, *down.tensors, *(part for each in norms for part in each.tensors), *(() if scale is None else (scale,)))
    (inputs, hidden), (taken, outputs) = up.sizes, down.sizes
    wrong = common_obstacle(x, tensors) or wrong_vector(down.bias, outputs, "bias")
    wrong = wrong or next(filter(None, (wrong_size(x, each) for each in (up.members if isinstance(up, Gated) else (up,)))), None)
    wrong = wrong or wrong_vector(scale, outputs, "scale") or wrong_norm(norm, inputs) or wrong_norm(inner, hidden)
    if wrong is not None:
        return wrong
    if hidden != taken or (residual and inputs != outputs):
        return f"expected layers that fit each other and the residual, got {inputs} to {hidden} and {taken} to {outputs} features"
    norms_reason = norm_reason(norm, inputs, x.dtype) or norm_reason(inner, hidden, x.dtype)
    if isinstance(up, Gated):
        return norms_reason or gated_reason(x, up, activation)
    whole = _whole_obstacle(x, up, down, activation, residual, inner)
    if whole is None or _few_rows_twice(x, norm, up, down, activation, inner):
        return None
    if isinstance(up, FusedFactors) and isinstance(down, FusedFactors) and inner is None and takes_ffn(x, up, down, activation):
        return norms_reason
    launches = norms_reason or epilogue_reason(up, x.dtype, x.device, activation)
    return None if launches is None else f"{whole}; {launches}"


def _few_rows_twice(x: Tensor, norm: Norm | None, up: Linear, down: Linear, activation: str, inner: Norm | None) -> bool:
    """Whether x has few rows, and their kernel takes both layers of a feed-forward block."""
    return takes_few_rows(x, (up,), norm, activation) and takes_few_rows(x, (down,), inner)


def _whole_obstacle(x: Tensor, up: Linear, down: Linear, activation: str, residual: bool, inner: Norm | None) -> str | None:
    """Why no kernel takes the whole block in one launch."""
    if inner is not None:
        return "the kernel of a whole block has no norm between its layers"
    if isinstance(up, Dense) or isinstance(down, Dense):
        return "the kernel of a whole block multiplies factors, and one of its layers is dense"
    return _ffn_obstacle(up.shapes, down.shapes, x.dtype, activation, residual, x.device.index)


@torch.compiler.assume_constant_result  # depends on the machine and the arguments alone
def _ffn_obstacle(
    up: tuple[tuple[int, ...], ...],
    down: tuple[tuple[int, ...], ...],
    dtype: torch.dtype,
    activation: str,
    residual: bool,
    device_index: int,
) -> str | None:
    return ffn_obstacle(Architecture.of(*up), Architecture.of(*down), dtype, activation, residual, device_index)


@torch.compiler.assume_constant_result
def _dense_advice(inputs: int, outputs: int, mode: str, device_index: int) -> str | None:
    return dense_advice(inputs, outputs, mode, device_index)
