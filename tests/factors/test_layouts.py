"""The block layout."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from torch import Tensor

from flysurgery.errors import PatternError
from flysurgery.factors import from_blocks, pattern_of, to_blocks
from flysurgery.patterns import Pattern
from tests.factors.strategies import small_factors
from tests.support.tolerance import assert_equal


@given(small_factors)
def test_each_block_is_one_slice(factor: Tensor) -> None:
    pattern, blocks = pattern_of(factor), to_blocks(factor)
    assert blocks.is_contiguous()
    for i in range(pattern.a):
        for j in range(pattern.d):
            assert_equal(blocks[i * pattern.d + j], factor[i, :, :, j])


@given(small_factors)
def test_there_and_back(factor: Tensor) -> None:
    back = from_blocks(to_blocks(factor), pattern_of(factor))
    assert back.is_contiguous()
    assert_equal(back, factor)


def test_blocks_of_another_shape_are_refused() -> None:
    with pytest.raises(PatternError, match=r"\(2,3,5,4\) have shape \(8, 3, 5\), got \(8, 5, 3\)"):
        from_blocks(torch.empty(8, 5, 3), Pattern(2, 3, 5, 4))
