"""Architectures against the product of their supports written out."""

import numpy as np
import pytest
from hypothesis import given

from flysurgery.errors import PatternError
from flysurgery.patterns import Architecture, check_fits, product_pattern
from tests.patterns.brute_force import blocks, path_counts, support
from tests.patterns.strategies import chainable, pairs

DOWN = Architecture.of((1, 128, 128, 3), (6, 64, 256, 1))


@given(pairs())
def test_sizes_and_parameters_are_those_of_the_supports(architecture: Architecture) -> None:
    left, right = map(support, architecture)
    assert architecture.shape == (left @ right).shape
    assert architecture.inner_features == (left.shape[1],)
    assert architecture.num_parameters == left.sum() + right.sum()
    assert architecture.density == pytest.approx((left.sum() + right.sum()) / (left @ right).size)


@given(pairs())
def test_ranks_are_the_path_counts_of_the_blocks(architecture: Architecture) -> None:
    assert architecture.ranks == (tuple(np.unique(path_counts(architecture)).tolist()),)
    assert sorted({rank for _, _, rank in blocks(architecture)}) == list(architecture.ranks[0])


@given(pairs())
def test_a_pair_is_chainable_where_its_product_is_a_pattern_with_one_rank(architecture: Architecture) -> None:
    if architecture.is_chainable:
        counts = path_counts(architecture)
        (rank,) = set(counts[counts > 0].tolist())
        assert np.array_equal(counts, rank * support(product_pattern(*architecture)))
    else:
        with pytest.raises(PatternError, match="not chainable"):
            product_pattern(*architecture)


@given(chainable())
def test_products_of_a_chainable_architecture_can_be_taken_in_any_order(architecture: Architecture) -> None:
    assert architecture.is_chainable
    first, second, third = architecture.patterns[:3]
    assert product_pattern(product_pattern(first, second), third) == product_pattern(first, product_pattern(second, third))


def test_a_product_needs_sizes_that_agree() -> None:
    with pytest.raises(PatternError, match=r"takes 4 features .* gives 9"):
        product_pattern(*Architecture.of((1, 2, 4, 1)).patterns, *Architecture.of((3, 3, 1, 1)).patterns)


def test_the_down_projection_has_eighteen_blocks_of_two_ranks() -> None:
    ranks = [rank for _, _, rank in blocks(DOWN)]
    assert (len(ranks), ranks.count(21), ranks.count(22)) == (18, 12, 6)
    assert DOWN.ranks == ((21, 22),)
    assert not DOWN.is_chainable


@given(pairs())
def test_transpose_reverses_the_product(architecture: Architecture) -> None:
    assert np.array_equal(path_counts(architecture.transpose), path_counts(architecture).T)
    assert architecture.transpose.transpose == architecture


@given(pairs())
def test_text_and_json_give_the_architecture_back(architecture: Architecture) -> None:
    assert Architecture.parse(str(architecture)) == architecture
    assert Architecture.from_json(architecture.to_json()) == architecture


@pytest.mark.parametrize("text", ["", "monarch", "(1,2,3)", "(1,2,3,4),", "(1,2,3,4)(1,2,3,4)", "(1,2,-3,4)", "__import__('os')"])
def test_text_that_is_no_architecture_is_refused(text: str) -> None:
    with pytest.raises(PatternError, match="expected patterns such as"):
        Architecture.parse(text)


@pytest.mark.parametrize("rows", [None, 3, "abcd", [[1, 2, 3]], [1, 2, 3, 4], {"a": 1}, [[1, 2, 3, None]]])
def test_json_that_is_no_architecture_is_refused(rows: object) -> None:
    with pytest.raises(PatternError, match="four"):
        Architecture.from_json(rows)


def test_an_architecture_needs_patterns_whose_sizes_agree() -> None:
    with pytest.raises(PatternError, match="at least one"):
        Architecture(())
    with pytest.raises(PatternError, match=r"takes 6 features .* gives 4"):
        Architecture.of((1, 2, 6, 1), (2, 2, 2, 1))


def test_an_architecture_of_another_size_does_not_fit() -> None:
    check_fits(DOWN, 384, 1536)
    with pytest.raises(PatternError, match=r"384x1536 matrix, the layer is 1536x384"):
        check_fits(DOWN, 1536, 384)
