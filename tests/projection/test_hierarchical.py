"""Products of three factors and more: exact recovery, and errors between provable bounds."""

from itertools import accumulate

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flysurgery.errors import ProjectionError
from flysurgery.patterns import Architecture, block_butterfly, kaleidoscope, product_pattern, square_dyadic
from flysurgery.projection import project
from tests.patterns.strategies import chainable
from tests.projection.oracle import EXACT, best_error, dense_product, random_matrix, random_product

SEEDS = st.integers(0, 2**31)


def split_errors(matrix: torch.Tensor, architecture: Architecture) -> list[float]:
    """For every place to cut the product in two, the smallest error of the two merged factors: lower bounds on any error."""
    heads = list(accumulate(architecture, product_pattern))
    tails = list(accumulate(reversed(architecture.patterns), lambda tail, pattern: product_pattern(pattern, tail)))[::-1]
    return [best_error(matrix, Architecture(cut)) for cut in zip(heads[:-1], tails[1:], strict=True)]


@settings(max_examples=40)
@given(chainable(), SEEDS)
def test_an_exact_product_is_recovered(architecture: Architecture, seed: int) -> None:
    matrix = random_product(architecture, seed)
    projection = project(matrix, architecture)
    assert [tuple(factor.shape) for factor in projection.factors] == [pattern.factor_shape for pattern in architecture]
    assert np.linalg.norm(dense_product(projection.factors) - matrix.numpy()) <= EXACT * float(matrix.norm())


@settings(max_examples=40)
@given(chainable(), SEEDS)
def test_the_error_lies_between_the_largest_cut_and_their_sum(architecture: Architecture, seed: int) -> None:
    matrix = random_matrix(architecture, seed)
    cuts = split_errors(matrix, architecture)
    error = float(np.linalg.norm(dense_product(project(matrix, architecture).factors) - matrix.numpy()))
    slack = EXACT * float(matrix.norm())
    assert max(cuts) - slack <= error <= float(np.linalg.norm(cuts)) + slack


def test_the_hadamard_matrix_is_a_square_dyadic_butterfly() -> None:
    hadamard = torch.ones(1, 1, dtype=torch.float64)
    for _ in range(6):
        hadamard = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64), hadamard)
    assert project(hadamard, square_dyadic(64)).relative_error <= EXACT
    assert project(random_matrix(square_dyadic(64)), square_dyadic(64)).relative_error > 0.5


def test_a_noisy_block_butterfly_is_found_again_near_the_noise() -> None:
    architecture = block_butterfly(64, 4)
    clean = random_product(architecture, 1)
    noise = random_matrix(architecture, 2)
    noise *= 1e-3 * clean.norm() / noise.norm()
    error = float(np.linalg.norm(dense_product(project(clean + noise, architecture).factors) - (clean + noise).numpy()))
    assert error <= np.sqrt(len(architecture) - 1) * float(noise.norm())


@pytest.mark.parametrize("magnitude", [1e-200, 1.0, 1e200])
def test_the_factors_share_one_magnitude(magnitude: float) -> None:
    matrix = random_matrix(block_butterfly(48, 3))
    scaled = project(matrix * magnitude, block_butterfly(48, 3))
    largest = [float(factor.abs().max()) for factor in scaled.factors]
    assert largest == pytest.approx([largest[0]] * 4, rel=EXACT)
    assert scaled.relative_error == pytest.approx(project(matrix, block_butterfly(48, 3)).relative_error, rel=EXACT)


def test_a_zero_matrix_has_a_zero_product() -> None:
    projection = project(torch.zeros(8, 8), square_dyadic(8))
    assert projection.relative_error == 0.0
    assert not dense_product(projection.factors).any()


def test_more_than_two_factors_must_be_chainable() -> None:
    with pytest.raises(ProjectionError, match=r"needs a chainable architecture, and \(4,2,2,1\),\(2,2,2,2\) in"):
        project(torch.zeros(8, 8), kaleidoscope(8))
    assert project(random_matrix(kaleidoscope(2)), kaleidoscope(2)).relative_error <= EXACT  # two factors, so nothing is refused
