"""Products of one Monarch matrix and the transpose of another: recovered exactly, and refused where there is no such product."""

import numpy as np
import pytest
import torch
from torch import Tensor

from flysurgery.errors import FlysurgeryError, OptionError, PatternError, ProjectionError
from flysurgery.patterns import Architecture
from flysurgery.projection import factor_mm_star
from tests.projection.oracle import EXACT, dense_product, random_matrix, random_product

SIZES = [(16, 4), (64, 8), (256, 16), (96, 16), (24, 4), (12, 1), (12, 12)]


def monarch_of(n: int, block: int) -> Architecture:
    """The Monarch of the paper, with blocks of side b; that of ``patterns.monarch`` where ``b² = n``."""
    s = n // block
    return Architecture.of((1, s, s, block), (s, block, block, 1))


def mm_star(n: int, block: int) -> Tensor:
    left, right = (random_product(monarch_of(n, block), seed) for seed in (0, 1))
    return left @ right.mT


@pytest.mark.parametrize(("dtype", "magnitude", "exact"), [("float64", 1, EXACT), ("float32", 1e-20, 1e-4), ("float32", 1e20, 1e-4)])
@pytest.mark.parametrize(("n", "block"), SIZES)
def test_a_product_of_two_random_monarch_matrices_is_recovered(n: int, block: int, dtype: str, magnitude: float, exact: float) -> None:
    weight = (mm_star(n, block) * magnitude).to(getattr(torch, dtype))
    before = weight.clone()
    found = factor_mm_star(weight, block)
    assert found.architecture.patterns == (*monarch_of(n, block), monarch_of(n, block).patterns[0])
    assert all(factor.dtype == weight.dtype and factor.is_contiguous() for factor in found.factors)
    matrix = weight.double().numpy() / magnitude
    assert np.linalg.norm(matrix - dense_product(found.factors) / magnitude) <= exact * np.linalg.norm(matrix)
    assert found.relative_error <= exact and torch.equal(weight, before)


def test_a_matrix_times_its_own_transpose_and_one_with_double_eigenvalues_and_a_zero_block_are_recovered() -> None:
    one = random_product(monarch_of(64, 8))
    assert factor_mm_star(one @ one.mT, 8).relative_error <= EXACT
    torch.manual_seed(1)
    left, middle, right = (torch.randn(shape, dtype=torch.float64) for shape in ((1, 8, 8, 8), (8, 8, 8, 1), (1, 8, 8, 8)))
    middle[1] = middle[0]  # a double eigenvalue of every matrix that is diagonalized
    middle[:, 3, 5] = 0  # one block of zeros
    assert factor_mm_star(torch.from_numpy(dense_product((left, middle, right))), 8).relative_error <= EXACT


CIRCULANT = random_matrix(Architecture.of((1, 16, 1, 1)))[(torch.arange(16)[:, None] - torch.arange(16)) % 16, 0]
NONE = "is no product MM"


@pytest.mark.parametrize(
    ("weight", "block", "error", "words"),
    [
        (random_matrix(Architecture.of((1, 16, 16, 1))), 4, ProjectionError, f"16x16 matrix {NONE}"),
        (CIRCULANT, 4, ProjectionError, f"{NONE}.* of real Monarch matrices"),  # its factors are complex
        (mm_star(64, 8), 16, ProjectionError, NONE),
        *((weight, 4, ProjectionError, "without singular blocks") for weight in (torch.zeros(16, 16), torch.eye(16))),
        (torch.full((4, 4), torch.nan), 2, ProjectionError, "16 NaN"),
        (torch.ones(4, 4, dtype=torch.complex64), 2, ProjectionError, "got torch.complex64"),
        (torch.ones(16, 12), 4, PatternError, r"multiple of it, got \(16, 12\)"),
        (torch.ones(16, 16), 3, PatternError, "blocks of 3 needs"),
        (torch.ones(16), 4, PatternError, r"got \(16,\)"),
        (torch.ones(16, 16), 0, OptionError, "block must be a positive integer, got 0"),
    ],
)
def test_what_is_no_such_product_is_one_sentence(weight: Tensor, block: int, error: type[FlysurgeryError], words: str) -> None:
    with pytest.raises(error, match=words) as caught:
        factor_mm_star(weight, block)
    assert len(str(caught.value)) <= 400 and "\n" not in str(caught.value)
