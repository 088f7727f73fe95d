"""The definition, held against the matrix written out."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from flysurgery.errors import PatternError
from flysurgery.factors import ks_einsum
from tests.factors.strategies import small_factors
from tests.support.oracle import dense
from tests.support.tolerance import assert_equal


@given(small_factors, st.lists(st.integers(0, 3), max_size=3))
def test_rows_meet_the_transposed_matrix(factor: Tensor, batch: list[int]) -> None:
    matrix = dense(factor)
    x = torch.randint(-3, 4, (*batch, matrix.shape[1])).double()
    out = ks_einsum(x, factor)
    assert out.shape == (*batch, matrix.shape[0])
    assert_equal(out, x @ matrix.mT)


@pytest.mark.parametrize("shape", [(41,), (3, 39), ()])
def test_rows_of_another_size_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(PatternError, match=r"pattern \(2,3,5,4\) takes rows of 40 features, got x of shape"):
        ks_einsum(torch.ones(shape), torch.ones(2, 3, 5, 4))


def test_gradients_of_first_and_second_order() -> None:
    x, factor = torch.randn(3, 12, dtype=torch.float64), torch.randn(2, 2, 3, 2, dtype=torch.float64)
    operands = [x.requires_grad_(), factor.requires_grad_()]
    assert torch.autograd.gradcheck(ks_einsum, operands)
    assert torch.autograd.gradgradcheck(ks_einsum, operands)
