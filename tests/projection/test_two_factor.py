"""Optimality and exact recovery of the two-factor projection, for any pair of patterns."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from flysurgery.patterns import Architecture, gonon, low_rank, monarch
from flysurgery.projection import project
from tests.patterns.brute_force import blocks
from tests.patterns.strategies import pairs
from tests.projection.oracle import EXACT, best_error, dense_factor, dense_product, error_by_alternating, random_matrix, random_product

SEEDS = st.integers(0, 2**31)


def error(matrix: Tensor, factors: tuple[Tensor, ...]) -> float:
    return float(np.linalg.norm(matrix.numpy() - dense_product(factors)))


@given(pairs(), SEEDS)
def test_the_error_is_the_smallest_that_block_svds_allow(architecture: Architecture, seed: int) -> None:
    matrix = random_matrix(architecture, seed)
    reached = error(matrix, project(matrix, architecture).factors)
    assert reached == pytest.approx(best_error(matrix, architecture), rel=EXACT, abs=EXACT * float(matrix.norm()))


@given(pairs(), SEEDS)
def test_an_exact_product_is_recovered(architecture: Architecture, seed: int) -> None:
    matrix = random_product(architecture, seed)
    projection = project(matrix, architecture)
    assert error(matrix, projection.factors) <= EXACT * float(matrix.norm())
    assert projection.relative_error <= EXACT


@pytest.mark.parametrize(
    "patterns",
    [
        ((1, 3, 2, 2), (2, 2, 3, 1)),
        ((1, 2, 4, 3), (6, 2, 2, 1)),  # ranks 0 and 1, not chainable
        ((1, 3, 5, 2), (5, 2, 2, 1)),  # uneven ranks
        ((2, 2, 3, 2), (1, 4, 3, 3)),  # the right one coarser than the left one
    ],
)
def test_alternating_least_squares_finds_nothing_better(patterns: tuple) -> None:
    architecture = Architecture.of(*patterns)
    matrix = random_matrix(architecture, 5)
    ours = error(matrix, project(matrix, architecture).factors)
    theirs = [error_by_alternating(matrix, architecture, seed) for seed in range(3)]
    assert min(theirs) >= ours * (1 - EXACT)
    assert min(theirs) <= ours * 1.001  # the search does reach the optimum, so it is a fair rival


@pytest.mark.parametrize(
    ("shape", "expected"), [((384, 384), 0.789), ((1536, 384), 0.615), ((384, 1536), 0.793)], ids=["square", "up", "down"]
)
def test_relative_errors_of_a_normal_matrix_are_the_known_ones(shape: tuple[int, int], expected: float) -> None:
    architecture = gonon(*shape)
    assert project(random_matrix(architecture), architecture).relative_error == pytest.approx(expected, abs=2e-3)


def test_the_blocks_of_the_down_projection_reach_their_uneven_ranks() -> None:
    architecture = gonon(96, 384)
    product = dense_product(project(random_matrix(architecture), architecture).factors)
    reached = [(np.linalg.matrix_rank(product[np.ix_(rows, columns)]), rank) for rows, columns, rank in blocks(architecture)]
    assert len(reached) == 18
    assert {rank for _, rank in reached} == {5, 6}
    assert all(found == rank for found, rank in reached)


@pytest.mark.parametrize(("m", "n", "nblocks"), [(64, 64, 4), (128, 32, 4), (36, 72, 3), (16, 16, 4)])
def test_it_agrees_with_the_monarch_projection_of_dao_et_al(m: int, n: int, nblocks: int) -> None:
    architecture = monarch(m, n, nblocks)
    (rank,) = architecture.ranks[0]
    matrix = random_matrix(architecture, 3)
    # One reshape and one fixed rank: output (p, k) with k the block of the first multiplication's result, input (r, s).
    slices = matrix.reshape(m // nblocks, nblocks, nblocks, n // nblocks).permute(1, 2, 0, 3)
    U, S, Vh = torch.linalg.svd(slices, full_matrices=False)
    down, up = Vh[..., :rank, :], U[..., :rank] * S[..., None, :rank]
    x = torch.eye(n, dtype=torch.float64).reshape(n, nblocks, n // nblocks)
    y = torch.einsum("krpt,krts,xrs->xpk", up, down, x).reshape(n, m)
    ours = dense_product(project(matrix, architecture).factors)
    assert np.linalg.norm(ours - y.T.numpy()) <= EXACT * np.linalg.norm(ours)


@given(pairs(), SEEDS)
def test_each_inner_index_is_shared_equally_by_both_factors(architecture: Architecture, seed: int) -> None:
    left, right = map(dense_factor, project(random_matrix(architecture, seed), architecture).factors)
    assert np.linalg.norm(left, axis=0) == pytest.approx(np.linalg.norm(right, axis=1), rel=EXACT, abs=EXACT)


def test_inner_indices_beyond_the_rank_of_a_block_are_zero() -> None:
    architecture = Architecture.of((1, 3, 5, 1), (1, 5, 4, 1))
    matrix = random_matrix(architecture)
    left, right = map(dense_factor, project(matrix, architecture).factors)
    assert np.count_nonzero(np.linalg.norm(left, axis=0)) == np.count_nonzero(np.linalg.norm(right, axis=1)) == 3
    assert np.linalg.norm(left @ right - matrix.numpy()) <= EXACT * float(matrix.norm())


@pytest.mark.parametrize("architecture", [monarch(32, 48, 4), gonon(48, 192), low_rank(24, 40, 7)], ids=str)
def test_a_zero_matrix_has_zero_factors(architecture: Architecture) -> None:
    projection = project(torch.zeros(architecture.shape, dtype=torch.float64), architecture)
    assert all(not factor.any() for factor in projection.factors)
    assert (projection.relative_error, projection.energy_kept) == (0.0, 1.0)


def test_blocks_of_zeros_beside_others_do_not_spoil_them() -> None:
    architecture = monarch(16, 16, 4)
    matrix = random_matrix(architecture)
    matrix[:, :4] = 0
    matrix[::4] = 0
    assert error(matrix, project(matrix, architecture).factors) == pytest.approx(best_error(matrix, architecture), rel=EXACT)
