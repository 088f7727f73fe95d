"""The calibrated projection of two factors: optimal where the optimum is known, and never rising elsewhere."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flysurgery.factors import factors_to_dense
from flysurgery.patterns import Architecture, gonon, low_rank, monarch
from flysurgery.projection import Fitted, project
from flysurgery.projection.block_cycling import block_cycling, cycle_together
from flysurgery.projection.low_rank import low_ranks
from tests.patterns.brute_force import blocks
from tests.patterns.strategies import pairs
from tests.projection.oracle import EXACT, best_error, dense_product, random_matrix, random_product

SEEDS = st.integers(0, 2**31)
NOT_CHAINABLE = Architecture.of((1, 2, 4, 3), (6, 2, 2, 1))
ARCHITECTURES = [monarch(24, 24, 2), gonon(24, 24), gonon(96, 24), gonon(24, 96), NOT_CHAINABLE]


def random_gram(n: int, seed: int = 0, decay: float = 1.0) -> Tensor:
    """A covariance of full rank whose eigenvalues fall as ``1 / k**(2*decay)``, in a random basis."""
    generator = torch.Generator().manual_seed(seed)
    basis = torch.linalg.qr(torch.randn(n, n, generator=generator, dtype=torch.float64))[0]
    values = torch.arange(1, n + 1, dtype=torch.float64) ** (-2 * decay)
    return (basis * values) @ basis.mT


def error(matrix: Tensor, product: np.ndarray, gram: Tensor) -> float:
    residual = matrix.numpy() - product
    whole = np.trace(matrix.numpy() @ gram.numpy() @ matrix.numpy().T)
    return float(np.sqrt(np.trace(residual @ gram.numpy() @ residual.T) / whole))


@settings(max_examples=25)
@given(pairs(), SEEDS)
def test_the_error_never_rises_and_is_that_of_the_factors(architecture: Architecture, seed: int) -> None:
    matrix, gram = random_matrix(architecture, seed), random_gram(architecture.in_features, seed)
    factors, errors = block_cycling(matrix, architecture, gram)
    assert all(later <= earlier + EXACT for earlier, later in pairwise(errors))
    assert error(matrix, dense_product(factors), gram) == pytest.approx(errors[-1], rel=1e-6, abs=1e-7)
    assert [tuple(factor.shape) for factor in factors] == [pattern.factor_shape for pattern in architecture]


@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=str)
def test_it_starts_no_worse_than_the_plain_projection_and_ends_better(architecture: Architecture) -> None:
    matrix, gram = random_matrix(architecture), random_gram(architecture.in_features)
    plain, errors = block_cycling(matrix, architecture, gram, sweeps=0)[1][0], block_cycling(matrix, architecture, gram)[1]
    assert plain <= error(matrix, dense_product(project(matrix, architecture).factors), gram) + EXACT
    assert errors[-1] < 0.95 * errors[0]


@settings(max_examples=25)
@given(pairs(), SEEDS)
def test_an_exact_product_is_recovered(architecture: Architecture, seed: int) -> None:
    matrix, gram = random_product(architecture, seed), random_gram(architecture.in_features, seed)
    factors, _ = block_cycling(matrix, architecture, gram)
    assert np.linalg.norm(matrix.numpy() - dense_product(factors)) <= 1e-6 * float(matrix.norm())


@settings(max_examples=25)
@given(pairs(), SEEDS)
def test_the_identity_as_metric_gives_the_plain_optimum(architecture: Architecture, seed: int) -> None:
    matrix = random_matrix(architecture, seed)
    factors, _ = block_cycling(matrix, architecture, torch.eye(architecture.in_features, dtype=torch.float64))
    reached = float(np.linalg.norm(matrix.numpy() - dense_product(factors)))
    assert reached == pytest.approx(best_error(matrix, architecture), rel=1e-9, abs=1e-9 * float(matrix.norm()))


def test_low_rank_is_the_reduced_rank_regression() -> None:
    architecture = low_rank(30, 40, 7)
    matrix, gram = random_matrix(architecture), random_gram(40)
    root = np.linalg.cholesky(gram.numpy())
    values = np.linalg.svd(matrix.numpy() @ root, compute_uv=False)
    best = np.sqrt((values[7:] ** 2).sum() / (values**2).sum())
    factors, errors = block_cycling(matrix, architecture, gram)
    assert errors[-1] == pytest.approx(best, rel=1e-9)
    assert error(matrix, dense_product(factors), gram) == pytest.approx(best, rel=1e-6)


def test_where_column_classes_are_uncorrelated_each_block_is_the_best_of_its_rank() -> None:
    architecture = NOT_CHAINABLE
    matrix, gram = random_matrix(architecture), torch.zeros(12, 12, dtype=torch.float64)
    squared, whole = 0.0, 0.0
    for rows, columns, rank in blocks(architecture):
        part = random_gram(len(columns), seed=int(columns[0]))
        gram[np.ix_(columns, columns)] = part
        values = np.linalg.svd(matrix.numpy()[np.ix_(rows, columns)] @ np.linalg.cholesky(part.numpy()), compute_uv=False)
        squared, whole = squared + (values[rank:] ** 2).sum(), whole + (values**2).sum()
    _, errors = block_cycling(matrix, architecture, gram)
    assert errors[-1] == pytest.approx(np.sqrt(squared / whole), rel=1e-8)


@pytest.mark.parametrize("architecture", [monarch(12, 12, 2), gonon(24, 24), NOT_CHAINABLE], ids=str)
def test_the_end_is_a_stationary_point(architecture: Architecture) -> None:
    matrix, gram = random_matrix(architecture), random_gram(architecture.in_features, decay=0.5)
    factors, errors = block_cycling(matrix, architecture, gram, sweeps=2000, enough=1e-12)
    leaves = [factor.clone().requires_grad_() for factor in factors]
    residual = matrix - factors_to_dense(leaves)
    ((residual @ gram * residual).sum() / (matrix @ gram * matrix).sum()).backward()
    slopes = [float((leaf.grad * leaf.detach()).abs().sum()) for leaf in leaves if leaf.grad is not None]  # free of units
    assert len(slopes) == 2 and max(slopes) < 1e-3 * errors[-1] ** 2


def problems_of(architecture: Architecture) -> tuple[list[Tensor], list[Tensor]]:
    """An ordinary matrix, one that is a product, zeros, and one whose metric lets the error fall slowly."""
    n = architecture.in_features
    matrices = [random_matrix(architecture), random_product(architecture, 1), torch.zeros(architecture.shape).double()]
    return [*matrices, random_matrix(architecture, 2)], [random_gram(n, seed, decay) for seed, decay in enumerate((1.0, 0.5, 1.0, 1.5))]


def check_alike(one: Fitted, other: Fitted) -> None:
    """The same errors, sweep by sweep; of an exact product rounding alone says after how many."""
    if other.errors[-1] > 1e-7:
        assert one.errors == pytest.approx(other.errors, rel=1e-7)
    else:
        assert one.errors[-1] <= 1e-7


@pytest.mark.parametrize("architecture", [*ARCHITECTURES, low_rank(24, 20, 5)], ids=str)
def test_matrices_that_are_worked_on_together_get_what_they_get_alone(architecture: Architecture) -> None:
    matrices, grams = problems_of(architecture)
    together = cycle_together(matrices, architecture, grams)
    alone = [cycle_together([matrix], architecture, [gram])[0] for matrix, gram in zip(matrices, grams, strict=True)]
    for one, other in zip(together, alone, strict=True):
        check_alike(one, other)
        assert torch.allclose(one.product, other.product, rtol=1e-7, atol=1e-7)
    assert len({len(each.errors) for each in together}) > 1 or architecture.patterns[1].a == 1  # they don't come to rest together


@pytest.mark.gpu
@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=str)
def test_a_gpu_gives_what_the_cpu_gives(architecture: Architecture) -> None:
    matrices, grams = problems_of(architecture)
    there = cycle_together([each.cuda() for each in matrices], architecture, [each.cuda() for each in grams])
    for one, other in zip(there, cycle_together(matrices, architecture, grams), strict=True):
        assert one.product.is_cuda
        check_alike(one, other)


@pytest.mark.parametrize("shape", [(30, 40), (40, 30), (20, 20)])
def test_all_low_ranks_at_once_are_the_best_of_each(shape: tuple[int, int]) -> None:
    ranks = (3, 20, 7, 1, 64)
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    gram = random_gram(shape[1])
    values = np.linalg.svd(matrix.numpy() @ np.linalg.cholesky(gram.numpy()), compute_uv=False) ** 2
    for rank, found in zip(ranks, low_ranks(matrix, ranks, gram), strict=True):
        best = float(np.sqrt(values[rank:].sum() / values.sum()))
        assert found.errors == pytest.approx([best], rel=1e-7, abs=1e-7)
        assert error(matrix, found.product.numpy(), gram) == pytest.approx(best, rel=1e-6, abs=1e-7)
        assert np.linalg.matrix_rank(found.product.numpy(), tol=1e-9) <= rank
