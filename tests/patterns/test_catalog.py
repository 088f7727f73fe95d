"""The named architectures against Table 8 and Appendix B.7 of Gonon et al. 2024."""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from flysurgery.errors import OptionError, PatternError
from flysurgery.patterns import (
    ARCHITECTURES,
    Architecture,
    block_butterfly,
    deformable,
    dense,
    family_of,
    gonon,
    kaleidoscope,
    low_rank,
    monarch,
    named,
    square_dyadic,
)
from tests.patterns.brute_force import path_counts

SIZES = st.integers(1, 60)


@given(SIZES, SIZES, st.integers(1, 6))
def test_monarch_is_the_row_of_the_table(x: int, y: int, p: int) -> None:
    m, n = x * p, y * p
    k, architecture = min(m, n), monarch(m, n, p)
    assert architecture.to_json() == [[1, m // p, k // p, p], [p, k // p, n // p, 1]]
    assert architecture.density == pytest.approx(k * (m + n) / p / (m * n))
    if p > 1:
        assert family_of(architecture) == "monarch"
    assert np.array_equal(path_counts(monarch(p * p, 2 * p * p, p)), np.ones((p * p, 2 * p * p))), "full support and one rank"


@given(st.integers(1, 200))
def test_gonon_keeps_density_and_grid_at_every_width(multiple: int) -> None:
    n = 24 * multiple
    for shape in [(1, 1), (4, 1), (1, 4)]:
        scaled, papers = gonon(shape[0] * n, shape[1] * n), gonon(shape[0] * 384, shape[1] * 384)
        assert scaled.shape == (shape[0] * n, shape[1] * n) and scaled.density == pytest.approx(papers.density)
        assert [(p.a, p.d) for p in scaled] == [(p.a, p.d) for p in papers]
        assert family_of(scaled) == "gonon" or multiple == 1  # the smallest ones are those of other families too


@given(st.integers(4, 3000), st.integers(4, 3000))
def test_the_default_rank_is_the_largest_multiple_of_eight_within_half_the_parameters(m: int, n: int) -> None:
    (rank,) = low_rank(m, n).inner_features
    step = 8 if rank >= 8 else 1
    assert rank % step == 0 and low_rank(m, n).density <= 0.5
    assert (rank + step) * (m + n) > m * n / 2
    assert family_of(low_rank(m, n)) == "low rank"


@given(st.integers(1, 5), st.integers(1, 9))
def test_butterflies_are_the_rows_of_the_table(depth: int, block: int) -> None:
    n = 2**depth
    assert block_butterfly(n * block, block).to_json() == [[2**i, 2 * block, 2 * block, 2 ** (depth - 1 - i)] for i in range(depth)]
    assert block_butterfly(n * block, block).is_chainable
    rows = [[2**i, 2, 2, 2 ** (depth - 1 - i)] for i in range(depth)]
    assert square_dyadic(n).to_json() == rows and kaleidoscope(n).to_json() == rows + rows[::-1]
    assert np.array_equal(path_counts(square_dyadic(n)), np.ones((n, n)))
    assert square_dyadic(n).is_chainable and kaleidoscope(n).is_chainable == (depth == 1)


@given(st.integers(-1, 200), st.integers(1, 20))
def test_butterflies_refuse_other_sizes(n: int, block: int) -> None:
    assume(n not in {block * 2**depth for depth in range(1, 8)})
    with pytest.raises(PatternError, match=f"{n}x{n}"):
        block_butterfly(n, block)


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (dense(6, 10), "(1,6,10,1)"),
        (low_rank(6, 10, 3), "(1,6,3,1),(1,3,10,1)"),
        (low_rank(384, 384), "(1,384,96,1),(1,96,384,1)"),
        (low_rank(384, 1536), "(1,384,152,1),(1,152,1536,1)"),
        (low_rank(64, 2), "(1,64,1,1),(1,1,2,1)"),
        (gonon(384, 384), "(1,192,48,2),(2,48,192,1)"),
        (gonon(1536, 384), "(1,768,192,2),(6,64,64,1)"),
        (gonon(384, 1536), "(1,128,128,3),(6,64,256,1)"),
        (deformable([(1, 4, 3, 2), (3, 2, 5, 1)]), "(1,4,3,2),(3,2,5,1)"),
        (named("gonon", 384, 1536), "(1,128,128,3),(6,64,256,1)"),
        (named("monarch", 384, 1536), str(monarch(384, 1536, 4))),
        (named("monarch", 384, 1536, nblocks=3), str(monarch(384, 1536, 3))),
        (named("lowrank", 384, 1536), str(low_rank(384, 1536))),
        (named("lowrank", 384, 1536, rank=7), str(low_rank(384, 1536, 7))),
    ],
)
def test_known_architectures(found: Architecture, expected: str) -> None:
    assert str(found) == expected and set(ARCHITECTURES) == {"monarch", "gonon", "lowrank"}


@pytest.mark.parametrize("patterns", [[(1, 6, 10, 1)], [(1, 2, 2, 2), (2, 2, 2, 1)] * 2, [(1, 4, 2, 2), (2, 2, 6, 1)]])
def test_architectures_of_no_family_are_other_ones(patterns: list[tuple[int, int, int, int]]) -> None:
    assert family_of(Architecture.of(*patterns)) == "other"


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: low_rank(8, 9, 9), PatternError, "8x9 .* rank 9"),
        (lambda: low_rank(8, 9, 0), OptionError, "rank must be a positive integer, got 0"),
        (lambda: monarch(384, 1536, 5), PatternError, "nblocks 5 .* 384x1536 .* that do: 4 and 6$"),
        (lambda: monarch(7, 7, 4), PatternError, "that do: 1 and 7$"),
        (lambda: monarch(12, 18, 9), PatternError, "that do: 6$"),
        *((lambda p=p: monarch(8, 8, p), OptionError, "nblocks must be a positive integer") for p in (0, -4, 2.0, True)),  # pyright: ignore[reportArgumentType]
        (lambda: gonon(4096, 1024), PatternError, "4096x1024 .* multiple of 6, got 1024"),
        *((lambda m=m, n=n: gonon(m, n), PatternError, f"got {m}x{n}") for m, n in ((1152, 384), (385, 384), (384, 1000), (4, 1537))),
        (lambda: square_dyadic(384), PatternError, r"square dyadic butterfly needs n = 2\^L with L >= 1, got a 384x384"),
        (lambda: block_butterfly(12, 5), PatternError, r"block size 5 needs n = 2\^L·5"),
        (lambda: block_butterfly(12, 0), OptionError, "block must be a positive integer"),
        (lambda: deformable([(1, 4, 3, 2), (3, 2, 5, 2)]), PatternError, "agree"),
        (lambda: named("butterfly", 8, 8), OptionError, "'butterfly'; choose one of monarch, gonon, lowrank"),
        (lambda: named("monarch", 8, 8, rank=3), OptionError, "rank 3 with 'monarch'"),
        *((lambda build=build: build(0, 384), PatternError, "0") for build in (monarch, gonon, low_rank, dense)),
    ],
)
def test_what_cannot_be_built_is_one_sentence(make: Callable[[], Architecture], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        make()
