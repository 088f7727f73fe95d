"""From a dense matrix to the nearest product of Kronecker-sparse factors."""

from __future__ import annotations

from time import perf_counter

import torch
from torch import Tensor

from flysurgery.errors import PatternError, ProjectionError
from flysurgery.factors import dense_to_factor
from flysurgery.patterns import Architecture, check_fits
from flysurgery.projection.hierarchical import hierarchical
from flysurgery.projection.report import Projection, as_projection
from flysurgery.projection.two_factor import two_factor


@torch.no_grad()
def project(
    weight: Tensor,  # shape: (out_features, in_features)
    architecture: Architecture,
) -> Projection:
    """Find factors of ``architecture`` whose product is near ``weight`` in the Frobenius norm, and measure how near.

    One factor: the entries on its support, exactly. Two factors, whatever their patterns: the optimum, by block SVDs. More:
    within ``sqrt(L-1)`` of the optimum if the architecture is chainable. ``weight`` may have any floating or complex dtype and lie
    on any device, and is not changed; the work is done in float64 or complex128 on the CPU, and the factors are rounded once to
    the dtype of ``weight`` and put on its device.

    Raises:
        PatternError: ``weight`` is no matrix of the architecture's shape; the message gives both shapes.
        ProjectionError: ``weight`` holds NaN or infinite entries (the message says how many and where the first is), holds
            integers, or the architecture has more than two factors and is not chainable.
    """
    started = perf_counter()
    matrix = checked_matrix(weight, architecture)
    return as_projection(weight, matrix, architecture, _nearest(matrix, architecture), started)


def _nearest(matrix: Tensor, architecture: Architecture) -> tuple[Tensor, ...]:
    if len(architecture) == 1:
        return (dense_to_factor(matrix, architecture.patterns[0]).clone(),)  # a full block would be a view of the weight
    if len(architecture) == 2:
        return two_factor(matrix, architecture)
    return hierarchical(matrix, architecture)


def checked_matrix(weight: Tensor, architecture: Architecture) -> Tensor:
    """``weight`` in float64 or complex128 on the CPU, if it can be projected; raises what ``project`` raises."""
    if weight.dim() != 2:
        raise PatternError(f"expected a matrix of shape {architecture.shape}, got a tensor of shape {tuple(weight.shape)}")
    check_fits(architecture, *weight.shape)
    if not (weight.is_floating_point() or weight.is_complex()):
        raise ProjectionError(f"expected a weight of floating-point or complex numbers, got {weight.dtype}; convert it first")
    if weight.is_meta:
        raise ProjectionError("the weight is on the meta device and has no values; load the model's weights first")
    wide = torch.complex128 if weight.is_complex() else torch.float64
    matrix = weight.detach().cpu().to(wide).contiguous()  # the order of sums, and so the last bit, follows the strides
    bad = (~matrix.isfinite()).nonzero()
    if len(bad):
        row, column = bad[0].tolist()
        raise ProjectionError(
            f"the weight has {len(bad)} NaN or infinite entries of {matrix.numel()}, the first {matrix[row, column].item()} "
            f"at row {row}, column {column}; only finite weights can be projected"
        )
    return matrix
