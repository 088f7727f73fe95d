"""Patterns are read off shapes, and between factors, blocks and dense matrices nothing is lost, and nothing else is gained."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from flysurgery.errors import PatternError
from flysurgery.factors import (
    architecture_of,
    dense_to_factor,
    factor_to_dense,
    factors_to_dense,
    from_blocks,
    ks_einsum,
    pattern_of,
    to_blocks,
)
from flysurgery.patterns import Architecture, Pattern
from tests.factors.strategies import small_factors, small_products
from tests.support.oracle import dense
from tests.support.problems import ARCHITECTURES, make_factors
from tests.support.tolerance import BF16, FP16, FP32, Arithmetic, assert_bounded, assert_equal

PATTERN = Pattern(2, 3, 5, 4)


def test_shapes_are_patterns() -> None:
    left, right = torch.empty(1, 7, 12, 2), torch.empty(PATTERN.factor_shape)
    assert pattern_of(right) == PATTERN
    assert architecture_of(iter([left, right])) == Architecture.of((1, 7, 12, 2), (2, 3, 5, 4))


@given(small_factors)
def test_dense_matrices_and_back(factor: Tensor) -> None:
    matrix = dense(factor)
    assert_equal(factor_to_dense(factor), matrix)
    matrix[matrix == 0] = torch.nan
    gathered = dense_to_factor(matrix, pattern_of(factor))
    assert_equal(gathered, factor)
    assert gathered.is_contiguous() and gathered.data_ptr() != matrix.data_ptr()


@given(small_factors)
def test_blocks_and_back(factor: Tensor) -> None:
    pattern, blocks = pattern_of(factor), to_blocks(factor)
    assert blocks.is_contiguous()
    for i in range(pattern.a):
        for j in range(pattern.d):
            assert_equal(blocks[i * pattern.d + j], factor[i, :, :, j])
    back = from_blocks(blocks, pattern)
    assert back.is_contiguous()
    assert_equal(back, factor)


@given(small_products())
def test_products_of_integers_are_exact_and_fresh(factors: list[Tensor]) -> None:
    for chain in (factors, factors[:1]):
        expected = dense(chain[0])
        for factor in chain[1:]:
            expected = expected @ dense(factor)
        found = factors_to_dense(chain)
        assert_equal(found, expected)
        found.zero_()
        assert_equal(factors_to_dense(chain), expected)


@pytest.mark.parametrize("mode", [FP32, FP16, BF16], ids=lambda mode: mode.name)
@pytest.mark.parametrize("architecture", ARCHITECTURES[:4], ids=str)
def test_half_precision_products_are_rounded_once(architecture: Architecture, mode: Arithmetic) -> None:
    left, right = make_factors(architecture, mode)
    matrix = factors_to_dense([left, right])
    assert matrix.dtype == left.dtype and matrix.is_contiguous()
    assert_bounded(matrix.mT, dense(right).mT, [left], None, mode)


@given(small_factors, st.lists(st.integers(0, 3), max_size=3))
def test_the_definition_multiplies_rows_by_the_transposed_matrix(factor: Tensor, batch: list[int]) -> None:
    matrix = dense(factor)
    x = torch.randint(-3, 4, (*batch, matrix.shape[1])).double()
    assert_equal(ks_einsum(x, factor), x @ matrix.mT)


def test_gradients_flow() -> None:
    factors = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((1, 2, 3, 2), (2, 3, 2, 1))]
    assert torch.autograd.gradcheck(lambda *factors: factors_to_dense(factors), factors)
    operands = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((3, 12), (2, 2, 3, 2))]
    assert torch.autograd.gradcheck(ks_einsum, operands) and torch.autograd.gradgradcheck(ks_einsum, operands)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: pattern_of(torch.empty(3, 5)), r"stored as \(a, b, c, d\), four dimensions; got a tensor of shape \(3, 5\)"),
        (lambda: pattern_of(torch.empty(2, 0, 5, 4)), r"four positive integers, got \(2, 0, 5, 4\)"),
        (lambda: factors_to_dense([torch.empty(1, 7, 5, 2), torch.empty(3, 2, 5, 2)]), "takes 10 features and .* gives 12"),
        (lambda: architecture_of([]), "at least one pattern"),
        (lambda: dense_to_factor(torch.empty(40, 24), PATTERN), r"matrix of shape \(24, 40\), got \(40, 24\)"),
        (lambda: from_blocks(torch.empty(8, 5, 3), PATTERN), r"\(2,3,5,4\) have shape \(8, 3, 5\), got \(8, 5, 3\)"),
        *(
            (lambda shape=shape: ks_einsum(torch.ones(shape), torch.ones(2, 3, 5, 4)), r"takes rows of 40 features, got x of shape")
            for shape in ((41,), (3, 39), ())
        ),
    ],
)
def test_shapes_that_do_not_fit_are_one_sentence(call: Callable[[], object], words: str) -> None:
    with pytest.raises(PatternError, match=words):
        call()
