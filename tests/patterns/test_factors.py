"""Patterns are read off shapes, and between factors, blocks and dense matrices nothing is lost, and nothing else is gained."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flysurgery.errors import PatternError
from flysurgery.factors import (
    architecture_of,
    bit_reversal,
    dense_to_factor,
    factor_to_dense,
    factors_to_dense,
    ks_einsum,
    pattern_of,
    to_blocks,
)
from flysurgery.patterns import Architecture, Pattern
from tests.patterns.strategies import pairs, patterns
from tests.support.oracle import dense
from tests.support.problems import ARCHITECTURES, make_factors
from tests.support.tolerance import BF16, FP16, FP32, Arithmetic, assert_bounded, assert_equal

PATTERN = Pattern(2, 3, 5, 4)
FACTOR = torch.ones(PATTERN.factor_shape)


@given(patterns(), st.lists(st.integers(0, 3), max_size=3))
def test_a_factor_its_blocks_and_its_matrix_are_the_same(pattern: Pattern, batch: list[int]) -> None:
    factor = torch.arange(1.0, pattern.nnz + 1, dtype=torch.float64).view(pattern.factor_shape)
    matrix = dense(factor)
    assert pattern_of(factor) == pattern
    assert_equal(factor_to_dense(factor), matrix)
    x = torch.randint(-3, 4, (*batch, matrix.shape[1])).double()
    assert_equal(ks_einsum(x, factor), x @ matrix.mT)
    assert_equal(to_blocks(factor), factor.permute(0, 3, 1, 2).reshape(-1, pattern.b, pattern.c))
    matrix[matrix == 0] = torch.nan
    gathered = dense_to_factor(matrix, pattern)
    assert_equal(gathered, factor)
    assert gathered.is_contiguous() and gathered.data_ptr() != matrix.data_ptr()


@given(pairs(), st.integers(1, 3), st.integers(0, 2**31))
def test_products_of_integers_are_exact_and_fresh(architecture: Architecture, count: int, seed: int) -> None:
    shapes = [pattern.factor_shape for pattern in (*architecture, architecture.patterns[1].transpose)][:count]
    factors = [torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(seed)).double() for shape in shapes]
    expected = dense(factors[0])
    for factor in factors[1:]:
        expected = expected @ dense(factor)
    factors_to_dense(factors).zero_()
    assert_equal(factors_to_dense(factors), expected)


@pytest.mark.parametrize("mode", [FP32, FP16, BF16], ids=lambda mode: mode.name)
@pytest.mark.parametrize("architecture", ARCHITECTURES[:4], ids=str)
def test_half_precision_products_are_rounded_once(architecture: Architecture, mode: Arithmetic) -> None:
    left, right = make_factors(architecture, mode)
    matrix = factors_to_dense([left, right])
    assert matrix.dtype == left.dtype and matrix.is_contiguous()
    assert_bounded(matrix.mT, dense(right).mT, [left], None, mode)


def test_gradients_flow() -> None:
    factors = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((1, 2, 3, 2), (2, 3, 2, 1))]
    assert torch.autograd.gradcheck(lambda *factors: factors_to_dense(factors), factors)
    operands = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((3, 12), (2, 2, 3, 2))]
    assert torch.autograd.gradcheck(ks_einsum, operands) and torch.autograd.gradgradcheck(ks_einsum, operands)


def test_bit_reversal_reads_digits_backwards() -> None:
    assert bit_reversal(1).tolist() == [0] and bit_reversal(2).tolist() == [0, 1] and bit_reversal(8).tolist() == [0, 4, 2, 6, 1, 5, 3, 7]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: pattern_of(torch.empty(3, 5)), r"stored as \(a, b, c, d\), four dimensions; got a tensor of shape \(3, 5\)"),
        (lambda: pattern_of(torch.empty(2, 0, 5, 4)), r"four positive integers, got \(2, 0, 5, 4\)"),
        (lambda: factors_to_dense([torch.empty(1, 7, 5, 2), torch.empty(3, 2, 5, 2)]), "takes 10 features and .* gives 12"),
        (lambda: architecture_of([]), "at least one pattern"),
        (lambda: bit_reversal(12), "a power of two, got 12"),
        (lambda: dense_to_factor(torch.empty(40, 24), PATTERN), r"matrix of shape \(24, 40\), got \(40, 24\)"),
        *((lambda shape=shape: ks_einsum(torch.ones(shape), FACTOR), "takes rows of 40 features") for shape in ((41,), (3, 39), ())),
    ],
)
def test_shapes_that_do_not_fit_are_one_sentence(call: Callable[[], object], words: str) -> None:
    with pytest.raises(PatternError, match=words):
        call()
