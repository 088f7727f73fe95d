"""First and second moments of the rows that enter a layer, summed up batch by batch."""

from __future__ import annotations

import torch
from torch import Tensor

STRIPE = 384
"""Columns of a Gram matrix that are made at a time on a CPU."""


class Moments:
    """Count, mean and covariance of rows of n features, in float64, from one pass over the batches.

    Holds one n×n matrix; adding ``rows`` rows costs ``2 * rows * n²`` flops, on a CPU little more than half of that where n is large. Sums
    are taken about the mean of the first batch, so that a large mean costs no digits. The matrices live where the rows do, on the CPU
    where a device has no float64.
    """

    def __init__(self, features: int) -> None:
        self.features = features
        self.rows = 0
        self.batches = 0
        self._origin: Tensor | None = None  # shape: (n,)
        self._sum: Tensor | None = None  # of x - origin, shape: (n,)
        self._scatter: Tensor | None = None  # of (x - origin)(x - origin)ᵀ, shape: (n, n)
        self._spread: Tensor | None = None  # the sum over the batches of ‖scatter of the batch‖² / rows of the batch

    def add(
        self,
        batch: Tensor,  # shape: (*batch, n)
    ) -> None:
        """Add the rows of one batch. Batches should be alike and independent: ``uncertainty`` compares them."""
        rows = batch.detach().reshape(-1, self.features)
        if not len(rows):
            return
        rows = (rows.cpu() if rows.device.type == "mps" else rows).to(torch.float64, copy=True)
        if self._origin is None or self._sum is None or self._scatter is None or self._spread is None:
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
        """Whether no NaN or infinite entry has come in; also true of no rows."""
        return self._scatter is None or bool(self._scatter.isfinite().all())

    @property
    def mean(self) -> Tensor:  # shape: (n,)
        """E[x]."""
        origin, total, _ = self._sums()
        return origin + total / self.rows

    @property
    def covariance(self) -> Tensor:  # shape: (n, n)
        """E[(x - E[x])(x - E[x])ᵀ], divided by the number of rows."""
        _, total, scatter = self._sums()
        offset = total / self.rows
        return scatter / self.rows - torch.outer(offset, offset)

    @property
    def second(self) -> Tensor:  # shape: (n, n)
        mean = self.mean
        return self.covariance + torch.outer(mean, mean)

    def mean_square(
        self,
        weight: Tensor,  # shape: (m, n), float64
        bias: Tensor | None = None,  # shape: (m,)
    ) -> float:
        """E|weight x + bias|²."""
        origin, total, scatter = self._sums()
        offset = total / self.rows
        about_origin = (weight @ scatter * weight).sum() / self.rows - (weight @ offset).square().sum()
        mean = weight @ (origin + offset)
        return max(float(about_origin + (mean if bias is None else mean + bias).square().sum()), 0.0)

    @property
    def uncertainty(self) -> float | None:
        """An estimate of E‖C - E[C]‖² for the covariance C (Frobenius), from how much the batches differ; None of fewer than two.

        Rows of one image depend on each other, so the batches, and not the rows, are taken as independent.
        """
        if self.batches < 2:
            return None
        _, _, scatter = self._sums()
        assert self._spread is not None
        between = float(self._spread - scatter.square().sum() / self.rows)
        return max(between, 0.0) / (self.batches - 1) / self.rows

    def permuted(
        self,
        order: Tensor,  # shape: (n,), a permutation of 0 to n-1
    ) -> Moments:
        origin, total, scatter = self._sums()
        other = Moments(self.features)
        other.rows, other.batches, other._spread = self.rows, self.batches, self._spread
        other._origin, other._sum, other._scatter = origin[order], total[order], scatter[order][:, order]
        return other

    def _sums(self) -> tuple[Tensor, Tensor, Tensor]:
        if self._origin is None or self._sum is None or self._scatter is None:
            raise ValueError("no rows were added, so there are no moments")
        return self._origin, self._sum, self._scatter


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
