"""What a projection found, and how far it is from the matrix."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter

import torch
from torch import Tensor

from flysurgery.factors import factors_to_dense
from flysurgery.patterns import Architecture


@dataclass(frozen=True)
class Projection:
    """Factors near a dense matrix W, and the errors of these factors as they are stored.

    Attributes:
        architecture: the patterns of the factors.
        factors: left to right, each of shape (a, b, c, d), in the dtype and on the device of W.
        relative_error: ``‖W - K_1 ... K_L‖ / ‖W‖`` in the Frobenius norm. The stored factors are multiplied out in float64,
            so rounding them to the dtype of W counts; the rounding of a multiplication at run time does not. 0 for W = 0.
        energy_kept: ``1 - relative_error²``, the share of ``‖W‖²`` that the product explains.
        seconds: wall time of the projection and of measuring it.
    """

    architecture: Architecture
    factors: tuple[Tensor, ...]
    relative_error: float
    energy_kept: float
    seconds: float


def as_projection(
    weight: Tensor,  # shape: (out_features, in_features)
    matrix: Tensor,  # the same in float64 or complex128
    architecture: Architecture,
    found: Sequence[Tensor],  # factors, in the dtype of ``matrix``
    started: float,
) -> Projection:
    """Round the factors to what ``weight`` is stored in, and measure them."""
    factors = tuple(factor.to(device=weight.device, dtype=weight.dtype) for factor in found)
    scale = matrix.abs().amax()
    if scale == 0:
        scale = torch.ones_like(scale)
    residual = (matrix - factors_to_dense([factor.to(matrix) for factor in factors])) / scale  # so that no square overflows
    norm = torch.linalg.vector_norm(matrix / scale)
    error = float(torch.linalg.vector_norm(residual) / norm) if norm > 0 else 0.0
    return Projection(architecture, factors, error, 1.0 - error**2, perf_counter() - started)
