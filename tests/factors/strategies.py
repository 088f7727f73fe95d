"""Random patterns and factors."""

from __future__ import annotations

import torch
from hypothesis import strategies as st
from torch import Tensor

from flysurgery.patterns import Pattern

small_patterns = st.builds(Pattern, *(st.integers(1, 4) for _ in range(4)))


@st.composite
def factors_of(draw: st.DrawFn, pattern: Pattern) -> Tensor:
    """A factor of distinct nonzero numbers, so that no two entries can be taken for one another."""
    start = draw(st.integers(1, 1000))
    return torch.arange(start, start + pattern.nnz, dtype=torch.float64).view(pattern.factor_shape)


small_factors = small_patterns.flatmap(factors_of)


@st.composite
def small_products(draw: st.DrawFn) -> list[Tensor]:
    """Two or three factors that chain, of small integers."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    size, patterns = None, []
    for _ in range(draw(st.integers(2, 3))):  # left to right: each one's outputs are its left neighbour's inputs
        if size is None:
            pattern = draw(small_patterns)
        else:
            a = draw(st.sampled_from([n for n in range(1, size + 1) if size % n == 0]))
            d = draw(st.sampled_from([n for n in range(1, size // a + 1) if size // a % n == 0]))
            pattern = Pattern(a, size // (a * d), draw(st.integers(1, 4)), d)
        patterns.append(pattern)
        size = pattern.in_features
    return [torch.randint(-3, 4, pattern.factor_shape, generator=generator).double() for pattern in patterns]
