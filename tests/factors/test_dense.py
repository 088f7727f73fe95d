"""Between factors and dense matrices nothing is lost, and nothing else is gained."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from torch import Tensor

from flysurgery.errors import PatternError
from flysurgery.factors import dense_to_factor, factor_to_dense, factors_to_dense, pattern_of
from flysurgery.patterns import Architecture, Pattern
from tests.factors.strategies import small_factors, small_products
from tests.support.oracle import dense
from tests.support.problems import ARCHITECTURES, make_factors
from tests.support.tolerance import BF16, FP16, FP32, Arithmetic, assert_bounded, assert_equal


@given(small_factors)
def test_entries_lie_where_the_definition_puts_them(factor: Tensor) -> None:
    assert_equal(factor_to_dense(factor), dense(factor))


@given(small_factors)
def test_the_gather_inverts_and_leaves_out_what_is_off_the_support(factor: Tensor) -> None:
    pattern = pattern_of(factor)
    matrix = dense(factor)
    matrix[matrix == 0] = torch.nan
    gathered = dense_to_factor(matrix, pattern)
    assert_equal(gathered, factor)
    assert gathered.is_contiguous()
    assert gathered.data_ptr() != matrix.data_ptr()


@given(small_products())
def test_products_of_integers_are_exact(factors: list[Tensor]) -> None:
    expected = dense(factors[0])
    for factor in factors[1:]:
        expected = expected @ dense(factor)
    assert_equal(factors_to_dense(factors), expected)


@pytest.mark.parametrize("mode", [FP32, FP16, BF16], ids=lambda mode: mode.name)
@pytest.mark.parametrize("architecture", ARCHITECTURES[:4], ids=str)
def test_half_precision_products_are_rounded_once(architecture: Architecture, mode: Arithmetic) -> None:
    left, right = make_factors(architecture, mode)
    matrix = factors_to_dense([left, right])
    assert matrix.dtype == left.dtype
    assert matrix.is_contiguous()
    assert_bounded(matrix.mT, dense(right).mT, [left], None, mode)


def test_a_matrix_of_another_shape_is_refused() -> None:
    with pytest.raises(PatternError, match=r"matrix of shape \(24, 40\), got \(40, 24\)"):
        dense_to_factor(torch.empty(40, 24), Pattern(2, 3, 5, 4))


def test_factors_that_do_not_chain_are_refused() -> None:
    with pytest.raises(PatternError, match=r"takes 10 features and .* gives 12"):
        factors_to_dense([torch.empty(1, 7, 5, 2), torch.empty(3, 2, 5, 2)])


def test_gradients_flow_through_densification() -> None:
    factors = [torch.randn(1, 2, 3, 2, dtype=torch.float64), torch.randn(2, 3, 2, 1, dtype=torch.float64)]
    assert torch.autograd.gradcheck(lambda *factors: factors_to_dense(factors), [factor.requires_grad_() for factor in factors])


def test_one_factor_comes_back_as_a_fresh_matrix() -> None:
    factor = torch.ones(1, 2, 3, 1)
    factors_to_dense([factor]).zero_()
    assert_equal(factor, torch.ones(1, 2, 3, 1))
