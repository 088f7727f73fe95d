"""Patterns and architectures are read off shapes."""

from __future__ import annotations

import pytest
import torch

from flysurgery.errors import PatternError
from flysurgery.factors import architecture_of, pattern_of
from flysurgery.patterns import Architecture, Pattern


def test_shapes_are_patterns() -> None:
    left, right = torch.empty(1, 7, 12, 2), torch.empty(2, 3, 5, 4)
    assert pattern_of(right) == Pattern(2, 3, 5, 4)
    assert architecture_of(iter([left, right])) == Architecture.of((1, 7, 12, 2), (2, 3, 5, 4))


def test_a_factor_has_four_dimensions() -> None:
    with pytest.raises(PatternError, match=r"stored as \(a, b, c, d\), four dimensions; got a tensor of shape \(3, 5\)"):
        pattern_of(torch.empty(3, 5))


def test_an_empty_dimension_is_refused() -> None:
    with pytest.raises(PatternError, match=r"four positive integers, got \(2, 0, 5, 4\)"):
        pattern_of(torch.empty(2, 0, 5, 4))


def test_neighbours_have_to_agree() -> None:
    with pytest.raises(PatternError, match=r"takes 10 features and .* gives 12"):
        architecture_of([torch.empty(1, 7, 5, 2), torch.empty(3, 2, 5, 2)])


def test_a_product_has_factors() -> None:
    with pytest.raises(PatternError, match="at least one pattern"):
        architecture_of([])
