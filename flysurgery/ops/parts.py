"""What the inference operators take beside x: a norm, and a layer of factors with its bias."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Norm:
    """Layer norm over the last dimension: ``(x - mean) / sqrt(variance + eps) * weight + bias``."""

    weight: Tensor | None  # shape: (features,)
    bias: Tensor | None  # shape: (features,)
    eps: float = 1e-5


@dataclass(frozen=True)
class FusedFactors:
    """One butterfly layer: its factors, left to right as in W = K_1 K_2, and its bias."""

    factors: tuple[Tensor, ...]  # shapes: (a, b, c, d)
    bias: Tensor | None = None  # shape: (out_features,)
