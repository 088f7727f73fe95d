"""Parts of transformer blocks on the GPU, drawn at random, and what their results are compared with."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor

from flysurgery.ops import Dense, FusedFactors, Norm
from flysurgery.patterns import Architecture

Part = TypeVar("Part")
DTYPES = [torch.float16, torch.bfloat16, torch.float32]
K = 1.25 * 1.2
"""Level 2 of the tolerance policy, for a product of factors in half precision."""
K_FP32 = 2.0
"""The goal for float32 by pairs of fp16, beside float32 by PyTorch."""


def normal(*shape: int, dtype: torch.dtype, deviation: float = 1.0, mean: float = 0.0) -> Tensor:
    return (torch.randn(shape, device="cuda") * deviation + mean).to(dtype)


def layer(architecture: Architecture, dtype: torch.dtype, bias: bool = True) -> FusedFactors:
    factors = tuple(normal(*pattern.factor_shape, dtype=dtype, deviation=pattern.c**-0.5) for pattern in architecture)
    return FusedFactors(factors, normal(architecture.out_features, dtype=dtype, deviation=0.3) if bias else None)


def dense(in_features: int, out_features: int, dtype: torch.dtype) -> Dense:
    weight = normal(out_features, in_features, dtype=dtype, deviation=in_features**-0.5)
    return Dense(weight, normal(out_features, dtype=dtype, deviation=0.3))


def affine(features: int, dtype: torch.dtype) -> Norm:
    return Norm(normal(features, dtype=dtype, mean=1.0, deviation=0.2), normal(features, dtype=dtype, deviation=0.2), 1e-6)


def wide(part: Part) -> Part:
    """The same in float64: a tensor, a part of a block or None."""
    if isinstance(part, Tensor):
        return part.double()  # pyright: ignore[reportReturnType]
    if isinstance(part, tuple):
        members = [wide(member) for member in part]
        return type(part)(*members) if hasattr(part, "_fields") else tuple(members)  # pyright: ignore[reportReturnType]
    return part


def comparable(out: Tensor, yardstick: Tensor, truth: Tensor, loss: float = 1.0) -> None:
    """Level 2; ``loss`` is the factor that the kernel says it may lose."""
    assert out.dtype == yardstick.dtype and out.shape == yardstick.shape
    assert bool(out.isfinite().all())
    error, allowed = (float((value.double() - truth).square().mean().sqrt()) for value in (out, yardstick))
    assert error <= loss * (K_FP32 if out.dtype == torch.float32 else K) * allowed, f"rms error {error:.3g}, PyTorch's is {allowed:.3g}"
