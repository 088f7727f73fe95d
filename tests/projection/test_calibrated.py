"""The calibrated projection: optimal where the optimum is known, never rising elsewhere; and the moments it is given."""

from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flysurgery.errors import ProjectionError
from flysurgery.factors import factors_to_dense
from flysurgery.patterns import Architecture, gonon, low_rank, monarch, square_dyadic
from flysurgery.projection import (
    FitProblem,
    Fitted,
    Moments,
    block_cycling,
    calibrated,
    fit_side_by_side,
    metric_of,
    output_error,
    project,
    project_calibrated,
)
from flysurgery.projection import moments as moments_module
from flysurgery.projection.block_cycling import cycle_together
from flysurgery.projection.two_factor import two_factor
from tests.patterns.strategies import pairs
from tests.projection.oracle import EXACT, best_error, dense_product, error_of, random_gram, random_matrix, random_product

SEEDS = st.integers(0, 2**31)
NOT_CHAINABLE = Architecture.of((1, 2, 4, 3), (6, 2, 2, 1))
ARCHITECTURES = [monarch(24, 24, 2), gonon(24, 24), gonon(96, 24), gonon(24, 96), NOT_CHAINABLE]
N = 16


def fitted(matrix: Tensor, architecture: Architecture, gram: Tensor, sweeps: int = block_cycling.SWEEPS) -> Fitted:
    return cycle_together([matrix], architecture, [gram], sweeps=sweeps)[0]


@settings(max_examples=25)
@given(pairs(), SEEDS)
def test_errors_never_rise_and_known_optima_are_reached(architecture: Architecture, seed: int) -> None:
    matrix, gram = random_matrix(architecture, seed), random_gram(architecture.in_features, seed)
    found = fitted(matrix, architecture, gram)
    assert all(later <= earlier + EXACT for earlier, later in pairwise(found.errors))
    factors = two_factor(found.product, *architecture)
    assert error_of(matrix, dense_product(factors), gram) == pytest.approx(found.errors[-1], rel=1e-6, abs=1e-7)
    plain = fitted(matrix, architecture, torch.eye(architecture.in_features, dtype=torch.float64)).product
    assert float((matrix - plain).norm()) == pytest.approx(best_error(matrix, architecture), rel=1e-9, abs=1e-9 * float(matrix.norm()))
    exact = random_product(architecture, seed)
    assert float((exact - fitted(exact, architecture, gram).product).norm()) <= 1e-6 * float(exact.norm())


@pytest.mark.parametrize("architecture", ARCHITECTURES[2:], ids=str)
def test_it_starts_no_worse_than_the_plain_projection_and_ends_better_at_a_stationary_point(
    architecture: Architecture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_cycling, "ENOUGH", 1e-12)
    matrix, gram = random_matrix(architecture), random_gram(architecture.in_features, decay=0.5)
    start = fitted(matrix, architecture, gram, sweeps=0).errors[0]
    assert start <= error_of(matrix, dense_product(project(matrix, architecture).factors), gram) + EXACT
    found = fitted(matrix, architecture, gram, sweeps=2000)
    assert found.errors[-1] < 0.99 * start
    leaves = [factor.clone().requires_grad_() for factor in two_factor(found.product, *architecture)]
    residual = matrix - factors_to_dense(leaves)
    ((residual @ gram * residual).sum() / (matrix @ gram * matrix).sum()).backward()
    slopes = [float((leaf.grad * leaf.detach()).abs().sum()) for leaf in leaves if leaf.grad is not None]  # free of units
    assert len(slopes) == 2 and max(slopes) < 1e-3 * found.errors[-1] ** 2


def problems_of(architecture: Architecture) -> tuple[list[Tensor], list[Tensor]]:
    """An ordinary matrix, one that is a product, zeros, and one whose metric lets the error fall slowly."""
    n = architecture.in_features
    matrices = [random_matrix(architecture), random_product(architecture, 1), torch.zeros(architecture.shape).double()]
    return [*matrices, random_matrix(architecture, 2)], [random_gram(n, seed, decay) for seed, decay in enumerate((1.0, 0.5, 1.0, 1.5))]


def check_alike(found: Sequence[Fitted], expected: Sequence[Fitted]) -> None:
    """The same errors, sweep by sweep; of an exact product rounding alone says after how many."""
    for one, other in zip(found, expected, strict=True):
        if other.errors[-1] > 1e-7:
            assert one.errors == pytest.approx(other.errors, rel=1e-7)
        else:
            assert one.errors[-1] <= 1e-7


@pytest.mark.gpu
@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=str)
def test_a_gpu_gives_what_the_cpu_gives(architecture: Architecture) -> None:
    matrices, grams = problems_of(architecture)
    there = cycle_together([each.cuda() for each in matrices], architecture, [each.cuda() for each in grams])
    assert all(each.product.is_cuda for each in there)
    check_alike(there, cycle_together(matrices, architecture, grams))


@pytest.mark.parametrize("together", [0, 1 << 20])
def test_problems_side_by_side_are_fitted_as_each_is_alone(together: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of one architecture do not come to rest together."""
    monkeypatch.setitem(calibrated.TOGETHER_BYTES, "cpu", together)
    given = [FitProblem(matrix.float(), each, gram) for each in ARCHITECTURES for matrix, gram in zip(*problems_of(each), strict=True)]
    given[1::2], given[::2] = given[::2], given[1::2]
    given += [FitProblem(given[0].weight, low_rank(24, 24, rank), given[0].gram) for rank in (2, 5, 24)]
    deep = FitProblem(random_matrix(square_dyadic(N)), square_dyadic(N), random_gram(N))
    found = dict(fit_side_by_side([*given, deep], lambda number, fitted: (number, fitted)))
    assert all(found[at][0] == at for at in found) and sorted(found) == list(range(len(given) + 1))
    assert found[len(given)][1] is None, "other than two factors are not fitted"
    fits = [fit for at in range(len(given)) if (fit := found[at][1]) is not None]
    alone = [fitted(each.weight.double(), each.architecture, each.gram) for each in given]
    check_alike(fits, alone)
    assert all(torch.allclose(one.product, other.product, rtol=1e-7, atol=1e-7) for one, other in zip(fits, alone, strict=True))
    with pytest.raises(ZeroDivisionError):
        list(fit_side_by_side(given, lambda number, _: number // 0))


def correlated(rows: int, n: int = 6, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(n, n, generator=torch.Generator().manual_seed(99), dtype=torch.float64)
    return torch.randn(rows, n, generator=generator, dtype=torch.float64) @ mixing + 2.0


def moments_of(x: Tensor, batch: int) -> Moments:
    found = Moments(x.shape[-1])
    for part in x.split(batch):
        found.add(part)
    return found


@pytest.fixture
def moments() -> Moments:
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(512, N, generator=generator) * torch.arange(1, N + 1) ** -1.0 @ torch.ones(N, N).triu() + 3
    return moments_of(rows, 64)


@pytest.fixture
def weight() -> Tensor:
    return torch.randn(N, N, generator=torch.Generator().manual_seed(2))


def test_factors_have_the_weights_dtype_and_less_output_error_and_the_shift_keeps_the_mean(moments: Moments, weight: Tensor) -> None:
    architecture, metric = monarch(N, N, 2), metric_of(moments, bias=True)
    half = project_calibrated(weight.to(torch.bfloat16), architecture, metric)
    assert {factor.dtype for factor in half.projection.factors} == {torch.bfloat16}
    found, plain = project_calibrated(weight, architecture, metric), project(weight, architecture)
    ours, theirs = (
        output_error(weight.double(), factors_to_dense([f.double() for f in each.factors]), shift, moments).relative
        for each, shift in ((found.projection, found.shift), (plain, None))
    )
    assert ours < 0.5 * theirs and found.projection.relative_error > plain.relative_error and found.reason is None
    product = factors_to_dense([factor.double() for factor in found.projection.factors])
    assert found.shift is not None
    assert torch.allclose(product @ moments.mean + found.shift, weight.double() @ moments.mean, rtol=1e-10)
    assert project_calibrated(weight, architecture, metric_of(moments, bias=False)).shift is None


def test_more_than_two_factors_are_the_plain_ones_with_the_reason(moments: Moments, weight: Tensor) -> None:
    metric = metric_of(moments, bias=True)
    found, plain = project_calibrated(weight, square_dyadic(N), metric), project(weight, square_dyadic(N))
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found.projection.factors, plain.factors, strict=True))
    assert found.reason is not None and "two factors" in found.reason and "has 4" in found.reason
    assert found.shift is not None and found.errors == ()
    weight[3, 4] = torch.nan
    with pytest.raises(ProjectionError, match="row 3, column 4"):
        project_calibrated(weight, monarch(N, N), metric)
    with pytest.raises(ProjectionError, match=r"expected a real weight to calibrate, got torch\.complex64; use project"):
        project_calibrated(torch.ones(N, N, dtype=torch.complex64), monarch(N, N), metric)


@pytest.mark.parametrize("stripe", [1, 4, 384])
def test_batches_of_any_size_and_shape_give_the_moments_and_errors_of_all_rows(stripe: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moments_module, "STRIPE", stripe)
    x, order = correlated(100), torch.tensor([3, 1, 5, 0, 2, 4])
    before, found = x.clone(), Moments(6)
    for part in (x[:1], x[1:37].reshape(3, 12, 6), x[37:37], x[37:]):
        found.add(part)
    assert found.rows == 100 and found.batches == 3 and torch.equal(x, before)
    assert torch.allclose(found.mean, x.mean(0), rtol=1e-12)
    assert torch.allclose(found.covariance, torch.cov(x.mT, correction=0), rtol=1e-10)
    assert torch.equal(found.covariance, found.covariance.mT)
    assert torch.allclose(found.second, x.mT @ x / 100, rtol=1e-10)
    assert torch.allclose(found.permuted(order).covariance, moments_of(x[:, order], 10).covariance)
    assert torch.allclose(found.permuted(order).mean, found.mean[order])
    assert torch.allclose(moments_of(x + 1e6, 16).covariance, moments_of(x, 16).covariance, rtol=1e-7, atol=1e-7), "a large mean costs none"
    half = correlated(5000).to(torch.bfloat16)
    assert torch.allclose(moments_of(half, 500).second, half.double().mT @ half.double() / 5000, rtol=1e-12)
    weight, stand_in, right = correlated(4, 6, 3), correlated(4, 6, 4), x @ correlated(4, 6, 3).mT
    for shift in (None, correlated(1, 4, 5)[0]):
        added = torch.zeros(4) if shift is None else shift
        assert found.mean_square(weight, shift) == pytest.approx(float((right + added).square().sum(1).mean()), rel=1e-12)
        relative = float((right - x @ stand_in.mT - added).norm() / right.norm())
        assert output_error(weight, stand_in, shift, found).relative == pytest.approx(relative, rel=1e-10)


def test_the_uncertainty_is_the_mean_squared_error_of_the_covariance() -> None:
    target = torch.cov(correlated(1_000_000, seed=1).mT)
    runs = [moments_of(correlated(320, seed=seed), 8) for seed in range(2, 60)]
    actual = sum(float((run.covariance - target).square().sum()) for run in runs) / len(runs)
    assert sum(run.uncertainty or 0.0 for run in runs) / len(runs) == pytest.approx(actual, rel=0.3)
    x = correlated(40)
    assert moments_of(x.repeat_interleave(16, 0), 16).uncertainty == pytest.approx(moments_of(x, 1).uncertainty, rel=1e-9)
    assert moments_of(x, 40).uncertainty is None, "one batch says nothing of it"


def test_shrinkage_falls_with_samples_keeps_the_trace_and_the_metric_positive() -> None:
    shares = [metric_of(moments_of(correlated(rows, seed=5), max(1, rows // 8)), bias=True).shrinkage for rows in (4, 40, 400, 4000)]
    assert shares == sorted(shares, reverse=True) and shares[0] > 10 * shares[-1]
    for few in (moments_of(correlated(3), 1), moments_of(torch.ones(32, 6), 4)):
        assert bool(torch.linalg.cholesky(metric_of(few, bias=True).gram).isfinite().all())
    found = moments_of(correlated(16), 2)
    for bias, whole in ((True, found.covariance), (False, found.second)):
        assert float(metric_of(found, bias=bias).gram.trace()) == pytest.approx(float(whole.trace()))
