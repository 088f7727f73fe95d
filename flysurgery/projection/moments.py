"""First and second moments of the rows that enter a layer, and by them the metric of errors in its weight, and the error of its output."""

from dataclasses import dataclass

import torch
from torch import Tensor

STRIPE = 384
"""Columns of a Gram matrix that are made at a time on a CPU."""

LEAST_SHRINKAGE = 1e-6
"""Keeps the form positive definite where a feature never varies, with 10 digits to spare in float64."""

SHRINKAGE_OF_ONE_BATCH = 0.1
"""Where there is one batch only, and so nothing to estimate the shrinkage from."""


class Moments:
    """Count, mean and covariance of rows of n features, in float64, from one pass over the batches.

    Holds one n×n matrix; adding ``rows`` rows costs ``2 * rows * n²`` flops, on a CPU little more than half of that where n is large. Sums
    are taken about the mean of the first batch, so that a large mean costs no digits. The matrices live where the rows do, on the CPU
    where a device has no float64.
    """

    _origin: Tensor  # shape: (n,)
    _sum: Tensor  # of x - origin, shape: (n,)
    _scatter: Tensor  # of (x - origin)(x - origin)ᵀ, shape: (n, n)
    _spread: Tensor  # the sum over the batches of ‖scatter of the batch‖² / rows of the batch

    def __init__(self, features: int) -> None:
        self.features = features
        self.rows = 0
        self.batches = 0

    def add(self, batch: Tensor) -> None:
        """Add the rows of one batch, shape (*batch, n). Batches should be alike and independent: ``uncertainty`` compares them."""
        rows = batch.detach().reshape(-1, self.features)
        if not len(rows):
            return
        rows = (rows.cpu() if rows.device.type == "mps" else rows).to(torch.float64, copy=True)
        if not self.rows:
            self._origin = rows.mean(0)
            self._sum = torch.zeros_like(self._origin)
            self._scatter = self._origin.new_zeros(self.features, self.features)
            self._spread = self._origin.new_zeros(())
        rows -= self._origin
        scatter = _gram(rows)
        self._sum += rows.sum(0)
        self._scatter += scatter
        self._spread += scatter.square().sum() / len(rows)
        self.rows += len(rows)
        self.batches += 1

    @property
    def is_finite(self) -> bool:
        """Whether no NaN or infinite entry has come in."""
        return bool(self._scatter.isfinite().all())

    @property
    def mean(self) -> Tensor:  # shape: (n,)
        """E[x]."""
        return self._origin + self._offset

    @property
    def _offset(self) -> Tensor:  # of the mean from the origin, shape: (n,)
        return self._sum / self.rows

    @property
    def covariance(self) -> Tensor:  # shape: (n, n)
        """E[(x - E[x])(x - E[x])ᵀ], divided by the number of rows."""
        return self._scatter / self.rows - torch.outer(self._offset, self._offset)

    @property
    def second(self) -> Tensor:  # shape: (n, n)
        return self.covariance + torch.outer(self.mean, self.mean)

    def mean_square(self, weight: Tensor, bias: Tensor | None = None) -> float:
        """E|weight x + bias|²; shapes (m, n) and (m,), in float64."""
        about_mean = (weight @ self._scatter * weight).sum() / self.rows - (weight @ self._offset).square().sum()
        mean = weight @ self.mean
        return max(float(about_mean + (mean if bias is None else mean + bias).square().sum()), 0.0)

    @property
    def uncertainty(self) -> float | None:
        """An estimate of E‖C - E[C]‖² for the covariance C (Frobenius), from how much the batches differ; None of fewer than two.

        Rows of one image depend on each other, so the batches, and not the rows, are taken as independent.
        """
        if self.batches < 2:
            return None
        between = float(self._spread - self._scatter.square().sum() / self.rows)
        return max(between, 0.0) / (self.batches - 1) / self.rows

    def permuted(self, order: Tensor) -> "Moments":
        """Those of the features in another order, a permutation of 0 to n-1."""
        other = Moments(self.features)
        other.rows, other.batches, other._spread = self.rows, self.batches, self._spread
        other._origin, other._sum, other._scatter = self._origin[order], self._sum[order], self._scatter[order][:, order]
        return other


def _gram(rows: Tensor) -> Tensor:  # shape: (n, n)
    """``rowsᵀ rows``; where that saves time, what lies above the stripes on the diagonal is copied from below."""
    if rows.is_cuda:
        return rows.mT @ rows
    gram = rows.new_empty(rows.shape[1], rows.shape[1])
    for start in range(0, len(gram), STRIPE):
        stripe = rows[:, start:].mT @ rows[:, start : start + STRIPE]
        gram[start:, start : start + STRIPE] = stripe
        gram[start : start + STRIPE, start:] = stripe.mT
    return gram


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

    def __add__(self, other: "OutputError") -> "OutputError":
        return OutputError(self.squared + other.squared, self.reference + other.reference)


def output_error(weight: Tensor, stand_in: Tensor, shift: Tensor | None, moments: Moments, reference: float | None = None) -> OutputError:
    """How far ``stand_in x + shift`` is from ``weight x``, over the rows of the moments, in float64 on their device.

    ``reference`` is the mean square of ``weight x`` where it is known.
    """
    mean = moments.mean
    weight = weight.to(mean)
    squared = moments.mean_square(weight - stand_in.to(mean), None if shift is None else -shift.to(mean))
    return OutputError(squared, moments.mean_square(weight) if reference is None else reference)
