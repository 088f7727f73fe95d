"""One linear with its epilogue in one launch, dense or of two factors, and what all inference operators refuse."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from flysurgery.ops.cuda.dense import dense_linear_operator, dense_obstacle
from flysurgery.ops.cuda.device import device_obstacle
from flysurgery.ops.cuda.epilogue import epilogue_obstacle, ks_linear_epilogue_operator
from flysurgery.ops.cuda.modes import present_mode
from flysurgery.ops.parts import Dense, Linear
from flysurgery.ops.problem import foreign_obstacle, is_tracing
from flysurgery.patterns import Architecture


def linear_epilogue(
    x: Tensor,  # shape: (*batch, in_features)
    linear: Linear,
    activation: str = "none",
    residual: Tensor | None = None,  # shape: (*batch, out_features)
    scale: Tensor | None = None,  # shape: (out_features,)
) -> Tensor:  # shape: (*batch, out_features)
    """``residual + activation(scale * linear(x))`` where ``epilogue_reason`` has none against it."""
    mode = present_mode(x.dtype)
    rows = x.reshape(-1, x.shape[-1])
    added = None if residual is None else residual.reshape(-1, residual.shape[-1])
    if isinstance(linear, Dense):
        y = dense_linear_operator(rows, linear.weight, linear.bias, activation, added, scale, mode)
    else:
        y = ks_linear_epilogue_operator(rows, list(linear.factors), linear.bias, activation, added, scale, mode)
    return y.view(*x.shape[:-1], y.shape[-1])


def epilogue_reason(linear: Linear, dtype: torch.dtype, device: torch.device, activation: str = "none") -> str | None:
    """Why no kernel runs a linear with this epilogue; None where one does. Whether sizes fit each other is not asked here."""
    mode = present_mode(dtype)
    if mode is None:
        return f"the fused operators take float32, float16 and bfloat16, not {dtype}"
    if isinstance(linear, Dense):
        return _dense_obstacle(*linear.sizes, mode, activation, device.index)
    return _factors_obstacle(linear.shapes, mode, activation, device.index)


def common_obstacle(x: Tensor, tensors: Iterable[Tensor]) -> str | None:
    """Why no fused operator takes these tensors, whatever it computes."""
    tensors = tuple(tensors)
    if x.device.type != "cuda":
        return f"the fused operators need tensors on a CUDA device, x is on {x.device.type}"
    if any(tensor.device != x.device for tensor in tensors):
        return f"the fused operators need all tensors on {x.device}, where x is"
    if is_tracing(*tensors) and not is_tracing(x):
        return f"the fused operators take plain tensors as weights, not {', '.join({type(tensor).__name__ for tensor in tensors})}"
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (x, *tensors)):
        return "the fused operators have no gradients; call them under torch.inference_mode() or torch.no_grad()"
    return foreign_obstacle()


def wrong_size(x: Tensor, linear: Linear) -> str | None:
    """Why rows of x do not fit a linear, or its bias does not."""
    inputs, outputs = linear.sizes
    if x.dim() == 0 or x.shape[-1] != inputs:
        return f"{_named(linear)} {inputs} features, got x of shape {tuple(x.shape)}"
    return wrong_vector(linear.bias, outputs, "bias")


def wrong_vector(vector: Tensor | None, size: int, name: str) -> str | None:
    """Why a vector is not one entry a feature."""
    if vector is None or tuple(vector.shape) == (size,):
        return None
    return f"expected a {name} of shape ({size},), got {tuple(vector.shape)}"


def _named(linear: Linear) -> str:
    if isinstance(linear, Dense):
        return f"a weight of shape {tuple(linear.weight.shape)} takes"
    return f"factors {Architecture.of(*(tuple(factor.shape) for factor in linear.factors))} take"


@torch.compiler.assume_constant_result  # depends on the machine and the arguments alone
def _dense_obstacle(inputs: int, outputs: int, mode: str, activation: str, device_index: int) -> str | None:
    return device_obstacle(device_index) or dense_obstacle(inputs, outputs, mode, activation, device_index)


@torch.compiler.assume_constant_result
def _factors_obstacle(shapes: tuple[tuple[int, ...], ...], mode: str, activation: str, device_index: int) -> str | None:
    return device_obstacle(device_index) or epilogue_obstacle(Architecture.of(*shapes), mode, activation, device_index)
