"""Random patterns and architectures that are small enough to be written out."""

from itertools import accumulate, pairwise
from math import lcm
from operator import mul

from hypothesis import strategies as st

from flysurgery.patterns import Architecture, Pattern

SMALL = st.integers(1, 4)


def patterns() -> st.SearchStrategy[Pattern]:
    """Any pattern with entries of at most four."""
    return st.builds(Pattern, SMALL, SMALL, SMALL, SMALL)


@st.composite
def pairs(draw: st.DrawFn) -> Architecture:
    """Any two patterns whose sizes agree, chainable or not; ranks may be uneven, zero, or larger than their block."""
    a1, d1, a2, d2, b1, c2 = (draw(SMALL) for _ in range(6))
    inner = lcm(a1 * d1, a2 * d2) * draw(SMALL)
    return Architecture.of((a1, b1, inner // (a1 * d1), d1), (a2, inner // (a2 * d2), c2, d2))


@st.composite
def chainable(draw: st.DrawFn, max_depth: int = 4) -> Architecture:
    """A chainable architecture of three factors and more: growing a, shrinking d, one rank between each two neighbours."""
    depth = draw(st.integers(3, max_depth))
    factor = st.integers(1, 2)
    a = list(accumulate([draw(factor) for _ in range(depth)], mul))
    d = list(accumulate([draw(factor) for _ in range(depth)], mul))[::-1]
    ranks = [draw(st.integers(1, 2)) for _ in range(depth - 1)]
    b = [draw(factor)] + [rank * outer // inner for rank, (outer, inner) in zip(ranks, pairwise(d), strict=True)]
    c = [rank * finer // coarser for rank, (coarser, finer) in zip(ranks, pairwise(a), strict=True)] + [draw(factor)]
    return Architecture.of(*zip(a, b, c, d, strict=True))
