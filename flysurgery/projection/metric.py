"""The quadratic form by which a calibrated projection measures errors."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flysurgery.projection.moments import Moments

LEAST_SHRINKAGE = 1e-6
"""Keeps the form positive definite where a feature never varies, with 10 digits to spare in float64."""

SHRINKAGE_OF_ONE_BATCH = 0.1
"""Where there is one batch only, and so nothing to estimate the shrinkage from."""


@dataclass(frozen=True)
class Metric:
    """Errors D of a matrix are measured by ``tr(D G Dᵀ)``.

    ``gram`` is G, positive definite, shape (n, n), float64. ``mean`` is E[x] where the layer has a bias that takes up the error's mean:
    then G is the covariance. Without a bias it is None, and G is the Gram matrix E[x xᵀ]. ``shrinkage`` is the share of the identity
    in G, between 0 and 1.
    """

    gram: Tensor
    mean: Tensor | None
    shrinkage: float


def metric_of(moments: Moments, *, bias: bool) -> Metric:
    """The metric of the rows that were seen, shrunk towards ``tr(G)/n`` times the identity as far as they are too few to know G.

    With C the matrix of the sample and T the target, the expected error of ``(1 - s) C + s T`` is smallest for
    ``s = E‖C - E[C]‖² / E‖C - T‖²``; the numerator is estimated from how much the batches differ.

    Source: Ledoit and Wolf 2004, "A well-conditioned estimator for large-dimensional covariance matrices".
    """
    gram = moments.covariance if bias else moments.second
    level = float(gram.diagonal().mean())
    identity = torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
    distance = float((gram - level * identity).square().sum())
    uncertainty = moments.uncertainty
    best = 1.0 if distance == 0 else SHRINKAGE_OF_ONE_BATCH if uncertainty is None else uncertainty / distance
    shrinkage = min(max(best, LEAST_SHRINKAGE), 1.0)
    return Metric((1 - shrinkage) * gram + shrinkage * (level or 1.0) * identity, moments.mean if bias else None, shrinkage)


@dataclass(frozen=True)
class OutputError:
    """Mean squared error of a layer's output over some rows, and the mean square of the right output without bias."""

    squared: float
    reference: float

    @property
    def relative(self) -> float:
        """The root of their quotient; 0 where the layer gives zeros only."""
        return (self.squared / self.reference) ** 0.5 if self.reference > 0 else 0.0

    def __add__(self, other: OutputError) -> OutputError:
        return OutputError(self.squared + other.squared, self.reference + other.reference)


def output_error(
    weight: Tensor,  # shape: (out_features, in_features), float64
    stand_in: Tensor,  # shape: (out_features, in_features), float64
    shift: Tensor | None,  # shape: (out_features,), what was added to the bias
    moments: Moments,
    reference: float | None = None,
) -> OutputError:
    """How far ``stand_in x + shift`` is from ``weight x``, over the rows of the moments; ``reference`` where it is known."""
    squared = moments.mean_square(weight - stand_in, None if shift is None else -shift)
    return OutputError(squared, moments.mean_square(weight) if reference is None else reference)
