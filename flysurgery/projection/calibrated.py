"""From a dense matrix to a product of factors whose outputs are close on given inputs."""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter

import torch
from torch import Tensor

from flysurgery.errors import ProjectionError
from flysurgery.patterns import Architecture
from flysurgery.projection.block_cycling import Fitted, cycle_together
from flysurgery.projection.moments import Metric
from flysurgery.projection.project import Projection, as_projection, checked_matrix, product_of, project
from flysurgery.projection.two_factor import two_factor


@dataclass(frozen=True)
class CalibratedProjection:
    """A projection that was fitted to inputs.

    Attributes:
        projection: the factors, and their error as a matrix, which is larger than that of the plain projection.
        shift: added to the bias, it keeps the mean of the output: ``(W - K_1 K_2) E[x]``; shape (out_features,), float64, None
            where the metric has no mean.
        errors: relative errors ``sqrt(tr(D G Dᵀ) / tr(W G Wᵀ))`` at the start and after each sweep, never rising.
        reason: why the factors are those of the plain projection; None where they are fitted.
    """

    projection: Projection
    shift: Tensor | None
    errors: tuple[float, ...]
    reason: str | None


@torch.no_grad()
def project_calibrated(
    weight: Tensor,  # shape: (out_features, in_features)
    architecture: Architecture,
    metric: Metric,
) -> CalibratedProjection:
    """Find factors of ``architecture`` whose product gives nearly the outputs of ``weight`` on inputs of the given metric.

    Two factors of any patterns are fitted by ``cycle_together``. For any other number there is no method here, so the result is
    the plain projection, with the reason. The work is done in float64 on the metric's device.

    Raises:
        PatternError, ProjectionError: as ``project`` does, and ProjectionError for complex weights.
    """
    if weight.is_complex():
        raise ProjectionError(f"expected a real weight to calibrate, got {weight.dtype}; use project for complex weights")
    matrix = checked_matrix(weight, architecture)
    fitted = None
    if len(architecture) == 2:
        (fitted,) = cycle_together([matrix.to(metric.gram.device)], architecture, [metric.gram])
    return calibrated_projection(weight, architecture, metric, fitted)


@torch.no_grad()
def calibrated_projection(
    weight: Tensor,  # shape: (out_features, in_features)
    architecture: Architecture,
    metric: Metric,
    fitted: Fitted | None,
) -> CalibratedProjection:
    """The result of ``project_calibrated`` for a product that is already fitted to the weight; None unless there are two factors."""
    if fitted is None:
        projection, errors = project(weight, architecture), ()
        reason = f"calibration is for products of two factors, and {architecture} has {len(architecture)}"
    else:
        started = perf_counter() - fitted.seconds
        found = two_factor(fitted.product.cpu(), architecture)
        projection, errors = as_projection(weight, checked_matrix(weight, architecture), architecture, found, started), fitted.errors
        reason = None
    return CalibratedProjection(projection, _shift(weight, projection, metric), errors, reason)


def _shift(weight: Tensor, projection: Projection, metric: Metric) -> Tensor | None:
    if metric.mean is None:
        return None
    product = product_of(projection)
    return (weight.detach().to(product) - product) @ metric.mean.cpu()
