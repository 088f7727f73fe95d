"""The calibrated projection: optimal where the optimum is known, never rising elsewhere, and the same for many matrices at once."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
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
    fit_side_by_side,
    metric_of,
    output_error,
    project,
    project_calibrated,
    side_by_side,
)
from flysurgery.projection.block_cycling import cycle_together
from flysurgery.projection.low_rank import low_ranks
from flysurgery.projection.two_factor import two_factor
from tests.patterns.brute_force import blocks
from tests.patterns.strategies import pairs
from tests.projection.oracle import EXACT, best_error, dense_product, error_of, random_gram, random_matrix, random_product

SEEDS = st.integers(0, 2**31)
NOT_CHAINABLE = Architecture.of((1, 2, 4, 3), (6, 2, 2, 1))
ARCHITECTURES = [monarch(24, 24, 2), gonon(24, 24), gonon(96, 24), gonon(24, 96), NOT_CHAINABLE]
N = 16


def fitted(matrix: Tensor, architecture: Architecture, gram: Tensor, **options: float) -> Fitted:
    return cycle_together([matrix], architecture, [gram], **options)[0]  # pyright: ignore[reportArgumentType]


@settings(max_examples=25)
@given(pairs(), SEEDS)
def test_errors_never_rise_and_known_optima_are_reached(architecture: Architecture, seed: int) -> None:
    matrix, gram = random_matrix(architecture, seed), random_gram(architecture.in_features, seed)
    found = fitted(matrix, architecture, gram)
    assert all(later <= earlier + EXACT for earlier, later in pairwise(found.errors))
    factors = two_factor(found.product, architecture)
    assert error_of(matrix, dense_product(factors), gram) == pytest.approx(found.errors[-1], rel=1e-6, abs=1e-7)
    plain = fitted(matrix, architecture, torch.eye(architecture.in_features, dtype=torch.float64)).product
    assert float((matrix - plain).norm()) == pytest.approx(best_error(matrix, architecture), rel=1e-9, abs=1e-9 * float(matrix.norm()))
    exact = random_product(architecture, seed)
    assert float((exact - fitted(exact, architecture, gram).product).norm()) <= 1e-6 * float(exact.norm())


@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=str)
def test_it_starts_no_worse_than_the_plain_projection_and_ends_better_at_a_stationary_point(architecture: Architecture) -> None:
    matrix, gram = random_matrix(architecture), random_gram(architecture.in_features, decay=0.5)
    start = fitted(matrix, architecture, gram, sweeps=0).errors[0]
    assert start <= error_of(matrix, dense_product(project(matrix, architecture).factors), gram) + EXACT
    found = fitted(matrix, architecture, gram, sweeps=2000, enough=1e-12)
    assert found.errors[-1] < 0.99 * start
    leaves = [factor.clone().requires_grad_() for factor in two_factor(found.product, architecture)]
    residual = matrix - factors_to_dense(leaves)
    ((residual @ gram * residual).sum() / (matrix @ gram * matrix).sum()).backward()
    slopes = [float((leaf.grad * leaf.detach()).abs().sum()) for leaf in leaves if leaf.grad is not None]  # free of units
    assert len(slopes) == 2 and max(slopes) < 1e-3 * found.errors[-1] ** 2


def test_where_column_classes_are_uncorrelated_each_block_is_the_best_of_its_rank() -> None:
    matrix, gram = random_matrix(NOT_CHAINABLE), torch.zeros(12, 12, dtype=torch.float64)
    squared, whole = 0.0, 0.0
    for rows, columns, rank in blocks(NOT_CHAINABLE):
        part = random_gram(len(columns), seed=int(columns[0]))
        gram[np.ix_(columns, columns)] = part
        values = np.linalg.svd(matrix.numpy()[np.ix_(rows, columns)] @ np.linalg.cholesky(part.numpy()), compute_uv=False)
        squared, whole = squared + (values[rank:] ** 2).sum(), whole + (values**2).sum()
    assert fitted(matrix, NOT_CHAINABLE, gram).errors[-1] == pytest.approx(np.sqrt(squared / whole), rel=1e-8)


@pytest.mark.parametrize("shape", [(30, 40), (40, 30), (20, 20)])
def test_low_ranks_are_reduced_rank_regressions(shape: tuple[int, int]) -> None:
    ranks = (3, 20, 7, 1, 64)
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    gram = random_gram(shape[1])
    values = np.linalg.svd(matrix.numpy() @ np.linalg.cholesky(gram.numpy()), compute_uv=False) ** 2
    for rank, found in zip(ranks, low_ranks(matrix, ranks, gram), strict=True):
        best = float(np.sqrt(values[rank:].sum() / values.sum()))
        assert found.errors == pytest.approx([best], rel=1e-7, abs=1e-7)
        assert error_of(matrix, found.product.numpy(), gram) == pytest.approx(best, rel=1e-6, abs=1e-7)
        assert np.linalg.matrix_rank(found.product.numpy(), tol=1e-9) <= rank
    assert fitted(matrix, low_rank(*shape, 7), gram).errors[-1] == pytest.approx(np.sqrt(values[7:].sum() / values.sum()), rel=1e-9)


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


@pytest.mark.parametrize("architecture", [*ARCHITECTURES, low_rank(24, 20, 5)], ids=str)
def test_matrices_that_are_worked_on_together_get_what_they_get_alone(architecture: Architecture) -> None:
    matrices, grams = problems_of(architecture)
    together = cycle_together(matrices, architecture, grams)
    alone = [fitted(matrix, architecture, gram) for matrix, gram in zip(matrices, grams, strict=True)]
    check_alike(together, alone)
    assert all(torch.allclose(one.product, other.product, rtol=1e-7, atol=1e-7) for one, other in zip(together, alone, strict=True))
    assert len({len(each.errors) for each in together}) > 1 or architecture.patterns[1].a == 1  # they don't come to rest together


@pytest.mark.gpu
@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=str)
def test_a_gpu_gives_what_the_cpu_gives(architecture: Architecture) -> None:
    matrices, grams = problems_of(architecture)
    there = cycle_together([each.cuda() for each in matrices], architecture, [each.cuda() for each in grams])
    assert all(each.product.is_cuda for each in there)
    check_alike(there, cycle_together(matrices, architecture, grams))


@pytest.mark.parametrize("together", [0, 1 << 20])
def test_problems_side_by_side_are_fitted_as_each_is_alone(together: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(side_by_side.TOGETHER_BYTES, "cpu", together)
    architectures = (monarch(N, N, 2), gonon(24, 24), monarch(N, N, 2), monarch(N, N, 4), square_dyadic(N))
    given = [FitProblem(random_matrix(each, n).float(), each, random_gram(each.in_features, n)) for n, each in enumerate(architectures)]
    given += [FitProblem(given[0].weight, low_rank(N, N, rank), given[0].gram) for rank in (2, 5)]
    found = dict(fit_side_by_side(given, lambda number, fitted: (number, fitted)))
    assert [number for number, _ in map(found.__getitem__, range(len(given)))] == list(range(len(given)))
    products = {number: each for number, (_, each) in found.items() if each is not None}
    assert sorted(products) == [0, 1, 2, 3, 5, 6], "other than two factors are not fitted"
    for number, product in products.items():
        alone = fitted(given[number].weight.double(), given[number].architecture, given[number].gram)
        assert product.errors[-1] == pytest.approx(alone.errors[-1], rel=1e-9) and product.seconds > 0
        assert torch.allclose(product.product, alone.product, atol=1e-7)
    with pytest.raises(ZeroDivisionError):
        list(fit_side_by_side(given, lambda number, _: number // 0))


@pytest.fixture
def moments() -> Moments:
    generator = torch.Generator().manual_seed(1)
    found = Moments(N)
    for _ in range(8):
        found.add(torch.randn(64, N, generator=generator) * torch.arange(1, N + 1) ** -1.0 @ torch.ones(N, N).triu() + 3)
    return found


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
