"""One pattern against its support written out."""

import numpy as np
import pytest
from hypothesis import given

from flysurgery.errors import PatternError
from flysurgery.patterns import MAX_FEATURES, Pattern
from tests.patterns.brute_force import support
from tests.patterns.strategies import patterns


@given(patterns())
def test_counts_are_those_of_the_support(pattern: Pattern) -> None:
    matrix = support(pattern)
    assert pattern.shape == matrix.shape
    assert pattern.nnz == matrix.sum() == np.prod(pattern.factor_shape)
    assert pattern.density == pytest.approx(matrix.mean())
    assert pattern.flops_per_row == 2 * matrix.sum()


@given(patterns())
def test_transpose_is_that_of_the_support(pattern: Pattern) -> None:
    assert np.array_equal(support(pattern.transpose), support(pattern).T)


@pytest.mark.parametrize("entries", [(0, 1, 1, 1), (1, -2, 1, 1), (1, 1, 1.0, 1), (1, 1, 1, True), (1, "2", 1, 1)])
def test_entries_that_are_no_positive_integers_are_refused(entries: tuple) -> None:
    with pytest.raises(PatternError, match="four positive integers"):
        Pattern(*entries)


def test_sizes_are_bounded() -> None:
    assert Pattern(MAX_FEATURES, 1, 1, 1).out_features == MAX_FEATURES
    with pytest.raises(PatternError, match=str(MAX_FEATURES)):
        Pattern(MAX_FEATURES, 2, 1, 1)
