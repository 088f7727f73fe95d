"""Moments summed up in one pass are those of all rows together, and say how well they are known."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from flysurgery.projection import Moments, metric_of, output_error
from flysurgery.projection import moments as moments_module


def correlated(rows: int, n: int = 6, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(n, n, generator=torch.Generator().manual_seed(99), dtype=torch.float64)
    return torch.randn(rows, n, generator=generator, dtype=torch.float64) @ mixing + 2.0


def moments(x: Tensor, batch: int) -> Moments:
    found = Moments(x.shape[-1])
    for part in x.split(batch):
        found.add(part)
    return found


@pytest.mark.parametrize("stripe", [1, 4, 6, 384])
def test_batches_of_any_size_and_shape_give_the_moments_of_all_rows(stripe: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moments_module, "STRIPE", stripe)
    x = correlated(100)
    before, found = x.clone(), Moments(6)
    for part in (x[:1], x[1:37].reshape(3, 12, 6), x[37:37], x[37:]):
        found.add(part)
    assert found.rows == 100 and found.batches == 3 and torch.equal(x, before)
    assert torch.allclose(found.mean, x.mean(0), rtol=1e-12)
    assert torch.allclose(found.covariance, torch.cov(x.mT, correction=0), rtol=1e-10)
    assert torch.equal(found.covariance, found.covariance.mT)
    assert torch.allclose(found.second, x.mT @ x / 100, rtol=1e-10)


def test_neither_a_large_mean_nor_half_precision_costs_digits() -> None:
    x = correlated(64)
    assert torch.allclose(moments(x + 1e6, 16).covariance, moments(x, 16).covariance, rtol=1e-7, atol=1e-7)
    half = correlated(5000).to(torch.bfloat16)
    assert torch.allclose(moments(half, 500).second, half.double().mT @ half.double() / 5000, rtol=1e-12)


def test_permuted_moments_are_those_of_permuted_rows() -> None:
    x, order = correlated(50), torch.tensor([3, 1, 5, 0, 2, 4])
    one, other = moments(x, 10).permuted(order), moments(x[:, order], 10)
    assert torch.allclose(one.covariance, other.covariance) and torch.allclose(one.mean, other.mean)
    assert one.rows == 50 and one.uncertainty == pytest.approx(other.uncertainty)


def test_the_uncertainty_is_the_mean_squared_error_of_the_covariance() -> None:
    target = torch.cov(correlated(1_000_000, seed=1).mT)
    runs = [moments(correlated(320, seed=seed), 8) for seed in range(2, 60)]
    actual = sum(float((run.covariance - target).square().sum()) for run in runs) / len(runs)
    assert sum(run.uncertainty or 0.0 for run in runs) / len(runs) == pytest.approx(actual, rel=0.3)
    x = correlated(40)
    assert moments(x.repeat_interleave(16, 0), 16).uncertainty == pytest.approx(moments(x, 1).uncertainty, rel=1e-9)
    assert moments(x, 40).uncertainty is None, "one batch says nothing of it"


def test_shrinkage_falls_with_samples_keeps_the_trace_and_the_metric_positive() -> None:
    shares = [metric_of(moments(correlated(rows, seed=5), max(1, rows // 8)), bias=True).shrinkage for rows in (4, 40, 400, 4000)]
    assert shares == sorted(shares, reverse=True) and shares[0] > 10 * shares[-1]
    assert float(torch.linalg.eigvalsh(metric_of(moments(correlated(3), 1), bias=True).gram)[0]) > 0
    constant = metric_of(moments(torch.ones(32, 6), 4), bias=True)
    assert bool(torch.linalg.cholesky(constant.gram).isfinite().all())
    found = moments(correlated(16), 2)
    assert float(metric_of(found, bias=True).gram.trace()) == pytest.approx(float(found.covariance.trace()))
    assert float(metric_of(found, bias=False).gram.trace()) == pytest.approx(float(found.second.trace()))


@pytest.mark.parametrize("shifted", [False, True])
def test_mean_squares_and_output_errors_are_those_of_the_rows(shifted: bool) -> None:
    x = correlated(60)
    generator = torch.Generator().manual_seed(3)
    weight, stand_in = (torch.randn(4, 6, generator=generator, dtype=torch.float64) for _ in range(2))
    shift = torch.randn(4, generator=generator, dtype=torch.float64) if shifted else None
    found, offset = moments(x, 7), 0 if shift is None else shift
    assert found.mean_square(weight, shift) == pytest.approx(float((x @ weight.mT + offset).square().sum(1).mean()), rel=1e-12)
    expected = float((x @ weight.mT - x @ stand_in.mT - offset).norm() / (x @ weight.mT).norm())
    assert output_error(weight, stand_in, shift, found).relative == pytest.approx(expected, rel=1e-10)
