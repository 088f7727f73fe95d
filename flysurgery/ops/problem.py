"""A multiplication as plain data: everything that a backend's answer may depend on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flysurgery.factors import architecture_of
from flysurgery.patterns import Architecture
from flysurgery.torch_state import is_tracing, tf32_allowed


@dataclass(frozen=True)
class Problem:
    """One multiplication ``y = x W^T + bias`` with W a product of factors, or by several such ``linears`` of one architecture.

    ``rows`` is the number of rows of x once all leading dimensions are flattened, and None while a graph is traced:
    the choice must then hold for any number of rows. ``tracing`` asks for operators that a graph can hold: PyTorch's
    own, or registered ones. ``requires_grad`` asks for gradients with respect to x, the factors and the bias.
    ``allow_tf32`` says whether float32 products may round their inputs to TF32 (CUDA only).
    """

    architecture: Architecture
    rows: int | None
    dtype: torch.dtype
    device_type: str
    bias: bool = False
    requires_grad: bool = False
    tracing: bool = False
    allow_tf32: bool = False
    linears: int = 1


def problem_of(
    x: Tensor,  # shape: (*batch, in_features)
    factors: Sequence[Tensor],  # shapes: (a, b, c, d), left to right as in W = K_1 K_2
    bias: Tensor | None = None,  # shape: (out_features,)
    dtype: torch.dtype | None = None,
    beside: Sequence[Tensor] = (),
) -> Problem:
    """Describe the multiplication of these tensors under the present settings of PyTorch.

    Args:
        dtype: what x will be cast to, if to anything.
        beside: the weights of other linears in the same call.
    """
    tensors = (x, *factors, *beside) if bias is None else (x, *factors, bias, *beside)
    tracing = is_tracing(*tensors)
    architecture = architecture_of(factors)
    return Problem(
        architecture=architecture,
        rows=None if tracing else x.numel() // architecture.in_features,
        dtype=dtype or x.dtype,
        device_type=x.device.type,
        bias=bias is not None,
        requires_grad=torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors),
        tracing=tracing,
        allow_tf32=x.device.type == "cuda" and tf32_allowed(),
    )
