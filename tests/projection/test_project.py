"""The plain projection: exact where it can be, optimal or within its bound elsewhere, and what it takes and gives."""

from __future__ import annotations

from itertools import accumulate

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flysurgery.errors import PatternError, ProjectionError
from flysurgery.patterns import (
    Architecture,
    Pattern,
    block_butterfly,
    dense,
    gonon,
    kaleidoscope,
    low_rank,
    monarch,
    product_pattern,
    square_dyadic,
)
from flysurgery.projection import project
from tests.patterns.brute_force import blocks, support
from tests.patterns.strategies import chainable, pairs, patterns
from tests.projection.oracle import EXACT, best_error, dense_factor, dense_product, error_by_alternating, random_matrix, random_product

SEEDS = st.integers(0, 2**31)
ANY_DEPTH = st.one_of(patterns().map(lambda pattern: Architecture((pattern,))), pairs(), chainable())


def error(matrix: Tensor, architecture: Architecture) -> float:
    return float(np.linalg.norm(matrix.numpy() - dense_product(project(matrix, architecture).factors)))


@given(ANY_DEPTH, SEEDS)
def test_an_exact_product_is_recovered(architecture: Architecture, seed: int) -> None:
    matrix = random_product(architecture, seed)
    projection = project(matrix, architecture)
    assert [tuple(factor.shape) for factor in projection.factors] == [pattern.factor_shape for pattern in architecture]
    assert np.linalg.norm(matrix.numpy() - dense_product(projection.factors)) <= EXACT * float(matrix.norm())
    assert projection.relative_error <= EXACT


@given(patterns(), SEEDS)
def test_one_factor_keeps_exactly_the_entries_on_its_support(pattern: Pattern, seed: int) -> None:
    matrix = random_matrix(Architecture((pattern,)), seed)
    (factor,) = project(matrix, Architecture((pattern,))).factors
    assert np.array_equal(dense_factor(factor), matrix.numpy() * support(pattern))


@given(pairs(), SEEDS)
def test_two_factors_are_the_optimum_and_share_each_inner_index_equally(architecture: Architecture, seed: int) -> None:
    matrix = random_matrix(architecture, seed)
    left, right = map(dense_factor, project(matrix, architecture).factors)
    reached = float(np.linalg.norm(matrix.numpy() - left @ right))
    assert reached == pytest.approx(best_error(matrix, architecture), rel=EXACT, abs=EXACT * float(matrix.norm()))
    assert np.linalg.norm(left, axis=0) == pytest.approx(np.linalg.norm(right, axis=1), rel=EXACT, abs=EXACT)


@settings(max_examples=40)
@given(chainable(), SEEDS)
def test_the_error_of_more_factors_lies_between_the_largest_cut_and_their_sum(architecture: Architecture, seed: int) -> None:
    matrix = random_matrix(architecture, seed)
    heads = list(accumulate(architecture, product_pattern))
    tails = list(accumulate(reversed(architecture.patterns), lambda tail, pattern: product_pattern(pattern, tail)))[::-1]
    cuts = [best_error(matrix, Architecture(cut)) for cut in zip(heads[:-1], tails[1:], strict=True)]
    slack = EXACT * float(matrix.norm())
    assert max(cuts) - slack <= error(matrix, architecture) <= float(np.linalg.norm(cuts)) + slack


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
    ours = error(matrix, architecture)
    theirs = min(error_by_alternating(matrix, architecture, seed) for seed in range(3))
    assert ours * (1 - EXACT) <= theirs <= ours * 1.001  # the search does reach the optimum, so it is a fair rival


@pytest.mark.parametrize(("shape", "expected"), [((384, 384), 0.789), ((1536, 384), 0.615), ((384, 1536), 0.793)])
def test_relative_errors_of_a_normal_matrix_are_the_known_ones(shape: tuple[int, int], expected: float) -> None:
    architecture = gonon(*shape)
    assert project(random_matrix(architecture), architecture).relative_error == pytest.approx(expected, abs=2e-3)


@pytest.mark.parametrize(("m", "n", "nblocks"), [(64, 64, 4), (128, 32, 4), (36, 72, 3)])
def test_it_agrees_with_the_monarch_projection_of_dao_et_al(m: int, n: int, nblocks: int) -> None:
    architecture = monarch(m, n, nblocks)
    (rank,) = architecture.ranks[0]
    matrix = random_matrix(architecture, 3)
    # One reshape and one fixed rank: output (p, k) with k the block of the first multiplication's result, input (r, s).
    slices = matrix.reshape(m // nblocks, nblocks, nblocks, n // nblocks).permute(1, 2, 0, 3)
    U, S, Vh = torch.linalg.svd(slices, full_matrices=False)
    theirs = torch.einsum("krpt,krts->pkrs", U[..., :rank] * S[..., None, :rank], Vh[..., :rank, :]).reshape(m, n)
    ours = dense_product(project(matrix, architecture).factors)
    assert np.linalg.norm(ours - theirs.numpy()) <= EXACT * np.linalg.norm(ours)


def test_known_deep_products() -> None:
    hadamard = torch.ones(1, 1, dtype=torch.float64)
    for _ in range(6):
        hadamard = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64), hadamard)
    assert project(hadamard, square_dyadic(64)).relative_error <= EXACT
    assert project(random_matrix(square_dyadic(64)), square_dyadic(64)).relative_error > 0.5
    architecture = block_butterfly(64, 4)
    clean, noise = random_product(architecture, 1), random_matrix(architecture, 2)
    noise *= 1e-3 * clean.norm() / noise.norm()
    assert error(clean + noise, architecture) <= np.sqrt(len(architecture) - 1) * float(noise.norm())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_the_error_is_that_of_the_stored_factors(dtype: torch.dtype) -> None:
    architecture = monarch(48, 72, 3)
    weight = random_matrix(architecture).to(dtype)
    projection = project(weight, architecture)
    assert all(factor.dtype == dtype and factor.is_contiguous() for factor in projection.factors)
    matrix = weight.double().numpy()
    measured = np.linalg.norm(matrix - dense_product(projection.factors)) / np.linalg.norm(matrix)
    assert projection.relative_error == pytest.approx(measured, rel=EXACT)
    assert projection.energy_kept == pytest.approx(1 - measured**2, rel=EXACT) and projection.seconds > 0
    optimum, rounding = best_error(weight, architecture) / np.linalg.norm(matrix), 2 * torch.finfo(dtype).eps
    assert optimum * (1 - EXACT) <= measured <= optimum + rounding


@given(pairs(), SEEDS)
def test_block_errors_are_those_of_the_blocks(architecture: Architecture, seed: int) -> None:
    matrix = random_matrix(architecture, seed)
    projection = project(matrix, architecture)
    residual, (left, right) = matrix.numpy() - dense_product(projection.factors), architecture
    assert projection.block_errors.shape == (left.a * left.d, right.a * right.d)
    for rows, columns, _ in blocks(architecture):
        row_class = rows[0] // (left.b * left.d) * left.d + rows[0] % left.d
        column_class = columns[0] // (right.c * right.d) * right.d + columns[0] % right.d
        found = float(projection.block_errors[row_class, column_class])
        assert found == pytest.approx(np.linalg.norm(residual[np.ix_(rows, columns)]), rel=EXACT, abs=EXACT)


@pytest.mark.parametrize("architecture", [monarch(16, 16, 4), block_butterfly(48, 3)], ids=str)
@pytest.mark.parametrize("magnitude", [1e-200, 1e200])
def test_extreme_weights_neither_overflow_nor_vanish(architecture: Architecture, magnitude: float) -> None:
    weight = random_matrix(architecture)
    usual, extreme = project(weight, architecture), project(weight * magnitude, architecture)
    assert extreme.relative_error == pytest.approx(usual.relative_error, rel=EXACT)
    assert (extreme.block_errors / magnitude).numpy() == pytest.approx(usual.block_errors.numpy(), rel=1e-8)
    largest = [float(factor.abs().max()) for factor in extreme.factors]
    assert len(largest) == 2 or largest == pytest.approx([largest[0]] * len(largest), rel=EXACT), "deep factors share one magnitude"


@pytest.mark.parametrize("architecture", [monarch(32, 48, 4), gonon(48, 192), low_rank(24, 40, 7), square_dyadic(8)], ids=str)
def test_zeros_stay_zeros_and_do_not_spoil_their_neighbours(architecture: Architecture) -> None:
    projection = project(torch.zeros(architecture.shape), architecture)
    assert (projection.relative_error, projection.energy_kept) == (0.0, 1.0)
    assert all(factor.isfinite().all() for factor in projection.factors) and not dense_product(projection.factors).any()
    if len(architecture) == 2:
        matrix = random_matrix(architecture)
        matrix[:, :4], matrix[::4] = 0, 0
        assert error(matrix, architecture) == pytest.approx(best_error(matrix, architecture), rel=EXACT)


@pytest.mark.parametrize("architecture", [dense(6, 4), gonon(48, 192), square_dyadic(8)], ids=str)
def test_the_weight_is_neither_changed_nor_shared_and_its_layout_does_not_matter(architecture: Architecture) -> None:
    weight = torch.nn.Parameter(random_matrix(architecture))
    before = weight.detach().clone()
    factors, other = project(weight, architecture).factors, project(before.mT.contiguous().mT, architecture).factors
    assert all(torch.equal(one, two) and not one.requires_grad for one, two in zip(factors, other, strict=True))
    for factor in factors:
        factor.zero_()
    assert torch.equal(weight, before)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_entries_that_are_not_finite_are_counted_and_located(bad: float) -> None:
    weight = torch.ones(8, 12, dtype=torch.bfloat16)
    weight[3, 7] = weight[3, 9] = weight[6, 0] = bad
    with pytest.raises(ProjectionError, match=rf"3 NaN or infinite entries of 96, the first {bad} at row 3, column 7"):
        project(weight, monarch(8, 12, 4))


@pytest.mark.parametrize(
    ("weight", "architecture", "error", "words"),
    [
        (torch.ones(8, 8, dtype=torch.int64), monarch(8, 8, 4), ProjectionError, "got torch.int64; convert it first"),
        (torch.ones(8, 8, dtype=torch.complex64), monarch(8, 8, 4), ProjectionError, "got torch.complex64"),
        (torch.ones(8, 8, device="meta"), monarch(8, 8, 4), ProjectionError, "meta device"),
        (torch.ones(8, 12), monarch(8, 8, 4), PatternError, "8x8"),
        (torch.ones(2, 8, 8), monarch(8, 8, 4), PatternError, r"shape \(8, 8\), got a tensor of shape \(2, 8, 8\)"),
        (torch.zeros(8, 8), kaleidoscope(8), ProjectionError, r"needs a chainable architecture, and \(4,2,2,1\),\(2,2,2,2\) in"),
    ],
)
def test_what_cannot_be_projected_is_one_sentence(weight: Tensor, architecture: Architecture, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        project(weight, architecture)


@pytest.mark.gpu
def test_factors_return_to_the_device_of_the_weight() -> None:
    weight = random_matrix(monarch(48, 72, 3)).cuda()
    factors, expected = project(weight, monarch(48, 72, 3)).factors, project(weight.cpu(), monarch(48, 72, 3)).factors
    assert all(one.device == weight.device and torch.equal(one.cpu(), two) for one, two in zip(factors, expected, strict=True))
