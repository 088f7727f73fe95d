"""Patterns and architectures against their supports written out."""

import numpy as np
import pytest
from hypothesis import given

from flysurgery.errors import PatternError
from flysurgery.patterns import MAX_FEATURES, Architecture, Pattern, check_fits, product_pattern
from tests.patterns.brute_force import blocks, path_counts, support
from tests.patterns.strategies import chainable, pairs, patterns

DOWN = Architecture.of((1, 128, 128, 3), (6, 64, 256, 1))


@given(patterns())
def test_a_pattern_is_its_support(pattern: Pattern) -> None:
    matrix = support(pattern)
    assert pattern.shape == matrix.shape
    assert pattern.nnz == matrix.sum() == np.prod(pattern.factor_shape)
    assert pattern.density == pytest.approx(matrix.mean())
    assert pattern.flops_per_row == 2 * matrix.sum()
    assert np.array_equal(support(pattern.transpose), matrix.T)


@given(pairs())
def test_an_architecture_is_the_product_of_its_supports(architecture: Architecture) -> None:
    left, right = map(support, architecture)
    assert architecture.shape == (left @ right).shape and architecture.inner_features == (left.shape[1],)
    assert architecture.num_parameters == left.sum() + right.sum()
    assert architecture.density == pytest.approx((left.sum() + right.sum()) / (left @ right).size)
    assert architecture.ranks == (tuple(np.unique(path_counts(architecture)).tolist()),)
    assert sorted({rank for _, _, rank in blocks(architecture)}) == list(architecture.ranks[0])
    assert np.array_equal(path_counts(architecture.transpose), path_counts(architecture).T)
    assert architecture.transpose.transpose == architecture
    assert Architecture.parse(str(architecture)) == Architecture.from_json(architecture.to_json()) == architecture


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


def test_the_down_projection_has_eighteen_blocks_of_two_ranks() -> None:
    ranks = [rank for _, _, rank in blocks(DOWN)]
    assert (len(ranks), ranks.count(21), ranks.count(22)) == (18, 12, 6)
    assert DOWN.ranks == ((21, 22),) and not DOWN.is_chainable


@pytest.mark.parametrize("entries", [(0, 1, 1, 1), (1, -2, 1, 1), (1, 1, 1.0, 1), (1, 1, 1, True), (1, "2", 1, 1)])
def test_entries_that_are_no_positive_integers_are_refused(entries: tuple) -> None:
    with pytest.raises(PatternError, match="four positive integers"):
        Pattern(*entries)


@pytest.mark.parametrize("text", ["", "monarch", "(1,2,3)", "(1,2,3,4),", "(1,2,3,4)(1,2,3,4)", "(1,2,-3,4)", "__import__('os')"])
def test_text_that_is_no_architecture_is_refused(text: str) -> None:
    with pytest.raises(PatternError, match="expected patterns such as"):
        Architecture.parse(text)


@pytest.mark.parametrize("rows", [None, 3, "abcd", [[1, 2, 3]], [1, 2, 3, 4], {"a": 1}, [[1, 2, 3, None]]])
def test_json_that_is_no_architecture_is_refused(rows: object) -> None:
    with pytest.raises(PatternError, match="four"):
        Architecture.from_json(rows)


def test_sizes_that_do_not_fit_are_refused() -> None:
    assert Pattern(MAX_FEATURES, 1, 1, 1).out_features == MAX_FEATURES
    check_fits(DOWN, 384, 1536)
    for words, make in (
        (str(MAX_FEATURES), lambda: Pattern(MAX_FEATURES, 2, 1, 1)),
        ("at least one", lambda: Architecture(())),
        (r"takes 6 features .* gives 4", lambda: Architecture.of((1, 2, 6, 1), (2, 2, 2, 1))),
        (r"takes 4 features .* gives 9", lambda: product_pattern(Pattern(1, 2, 4, 1), Pattern(3, 3, 1, 1))),
        (r"384x1536 matrix, the layer is 1536x384", lambda: check_fits(DOWN, 1536, 384)),
    ):
        with pytest.raises(PatternError, match=words):
            make()
