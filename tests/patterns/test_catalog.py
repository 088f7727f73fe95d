"""The named architectures against Table 8 and Appendix B.7 of Gonon et al. 2024."""

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


@given(SIZES, SIZES, st.integers(2, 6))
def test_the_family_of_an_architecture_is_the_one_that_made_it(x: int, y: int, p: int) -> None:
    m, n = x * p, y * p
    assert family_of(monarch(m, n, p)) == "monarch"
    assert family_of(low_rank(m, n)) == "low rank"
    for size in ((24 * p, 24 * p), (96 * p, 24 * p), (24 * p, 96 * p)):
        assert family_of(gonon(*size)) == "gonon"


def test_architectures_of_no_family_are_other_ones() -> None:
    for architecture in (
        dense(6, 10),
        square_dyadic(8),
        Architecture.of((1, 4, 2, 2), (2, 2, 6, 1)),
        Architecture.of((2, 4, 3, 1), (2, 3, 4, 1)),
    ):
        assert family_of(architecture) == "other"


def test_dense_and_low_rank_are_the_rows_of_the_table() -> None:
    assert str(dense(6, 10)) == "(1,6,10,1)"
    assert str(low_rank(6, 10, 3)) == "(1,6,3,1),(1,3,10,1)"


@pytest.mark.parametrize(("m", "n", "rank"), [(384, 384, 96), (1536, 384, 152), (384, 1536, 152), (16, 16, 4), (1, 1, 1), (64, 2, 1)])
def test_the_default_rank_is_known(m: int, n: int, rank: int) -> None:
    assert low_rank(m, n).inner_features == (rank,)


@given(st.integers(4, 3000), st.integers(4, 3000))
def test_the_default_rank_is_the_largest_multiple_of_eight_within_half_the_parameters(m: int, n: int) -> None:
    (rank,) = low_rank(m, n).inner_features
    step = 8 if rank >= 8 else 1
    assert rank % step == 0
    assert low_rank(m, n).density <= 0.5
    assert (rank + step) * (m + n) > m * n / 2


def test_a_rank_outside_its_range_is_refused() -> None:
    assert low_rank(8, 9, 8).inner_features == (8,)
    with pytest.raises(PatternError, match=r"8x9 .* rank 9"):
        low_rank(8, 9, 9)
    with pytest.raises(OptionError, match="rank must be a positive integer, got 0"):
        low_rank(8, 9, 0)


@given(SIZES, SIZES, st.integers(1, 6))
def test_monarch_is_the_row_of_the_table(x: int, y: int, p: int) -> None:
    m, n = x * p, y * p
    architecture = monarch(m, n, p)
    k = min(m, n)
    assert architecture.to_json() == [[1, m // p, k // p, p], [p, k // p, n // p, 1]]
    assert architecture.shape == (m, n)
    assert architecture.density == pytest.approx(k * (m + n) / p / (m * n))


@pytest.mark.parametrize("p", [2, 3, 4])
def test_monarch_of_a_matching_size_has_full_support_and_one_rank(p: int) -> None:
    counts = path_counts(monarch(p * p, 2 * p * p, p))
    assert np.array_equal(counts, np.ones((p * p, 2 * p * p)))


@pytest.mark.parametrize(("m", "n", "p", "nearest"), [(384, 1536, 5, "4 and 6"), (7, 7, 4, "1 and 7"), (12, 18, 9, "6"), (10, 21, 3, "1")])
def test_monarch_that_does_not_divide_names_what_would(m: int, n: int, p: int, nearest: str) -> None:
    with pytest.raises(PatternError, match=f"nblocks {p} .* {m}x{n} .* that do: {nearest}$"):
        monarch(m, n, p)


@pytest.mark.parametrize("p", [0, -4, 2.0, True])
def test_monarch_needs_a_positive_number_of_blocks(p: object) -> None:
    with pytest.raises(OptionError, match="nblocks must be a positive integer"):
        monarch(8, 8, p)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((384, 384), "(1,192,48,2),(2,48,192,1)"),
        ((1536, 384), "(1,768,192,2),(6,64,64,1)"),
        ((384, 1536), "(1,128,128,3),(6,64,256,1)"),
    ],
)
def test_gonon_is_the_papers_own_for_a_small_vit(shape: tuple[int, int], expected: str) -> None:
    assert str(gonon(*shape)) == expected


@given(st.integers(1, 200))
def test_gonon_keeps_density_and_grid_at_every_width(multiple: int) -> None:
    n = 24 * multiple
    for shape in [(1, 1), (4, 1), (1, 4)]:
        scaled, papers = gonon(shape[0] * n, shape[1] * n), gonon(shape[0] * 384, shape[1] * 384)
        assert scaled.shape == (shape[0] * n, shape[1] * n)
        assert scaled.density == pytest.approx(papers.density)
        assert [(p.a, p.d) for p in scaled] == [(p.a, p.d) for p in papers]


@pytest.mark.parametrize(("width", "rectangular"), [(192, True), (768, True), (1024, False), (1280, False)])
def test_gonon_covers_the_vit_widths_that_divide(width: int, rectangular: bool) -> None:
    assert gonon(width, width).shape == (width, width)
    for shape in [(4 * width, width), (width, 4 * width)]:
        if rectangular:
            assert gonon(*shape).shape == shape
        else:
            with pytest.raises(PatternError, match=f"{shape[0]}x{shape[1]} .* multiple of 6, got {width}"):
                gonon(*shape)


@pytest.mark.parametrize("shape", [(1152, 384), (385, 384), (1537, 384), (384, 1000), (4, 1537)])
def test_gonon_has_nothing_for_other_shapes(shape: tuple[int, int]) -> None:
    with pytest.raises(PatternError, match=f"got {shape[0]}x{shape[1]}"):
        gonon(*shape)


@pytest.mark.parametrize("depth", range(1, 6))
def test_square_dyadic_and_kaleidoscope_are_the_rows_of_the_table(depth: int) -> None:
    n = 2**depth
    rows = [[2 ** (level - 1), 2, 2, 2 ** (depth - level)] for level in range(1, depth + 1)]
    mirrored = [[2 ** (depth - level), 2, 2, 2 ** (level - 1)] for level in range(1, depth + 1)]
    assert square_dyadic(n).to_json() == rows
    assert kaleidoscope(n).to_json() == rows + mirrored
    assert np.array_equal(path_counts(square_dyadic(n)), np.ones((n, n)))
    assert square_dyadic(n).is_chainable
    assert kaleidoscope(n).is_chainable == (depth == 1)


@given(st.integers(1, 5), st.integers(1, 9))
def test_block_butterfly_is_the_row_of_the_table(depth: int, block: int) -> None:
    architecture = block_butterfly(2**depth * block, block)
    assert architecture.to_json() == [[2 ** (level - 1), 2 * block, 2 * block, 2 ** (depth - level)] for level in range(1, depth + 1)]
    assert architecture.is_chainable


@given(st.integers(-1, 200), st.integers(1, 20))
def test_butterflies_refuse_other_sizes(n: int, block: int) -> None:
    assume(n not in {block * 2**depth for depth in range(1, 8)})
    with pytest.raises(PatternError, match=f"{n}x{n}"):
        block_butterfly(n, block)


def test_butterfly_errors_say_what_is_needed() -> None:
    with pytest.raises(PatternError, match=r"square dyadic butterfly needs n = 2\^L with L >= 1, got a 384x384"):
        square_dyadic(384)
    with pytest.raises(PatternError, match=r"block size 5 needs n = 2\^L·5"):
        block_butterfly(12, 5)
    with pytest.raises(OptionError, match="block must be a positive integer"):
        block_butterfly(12, 0)


def test_deformable_takes_any_patterns_that_chain() -> None:
    assert deformable([(1, 4, 3, 2), (3, 2, 5, 1)]) == Architecture.of((1, 4, 3, 2), (3, 2, 5, 1))
    with pytest.raises(PatternError, match="agree"):
        deformable([(1, 4, 3, 2), (3, 2, 5, 2)])


def test_named_gives_each_architecture() -> None:
    built = {name: named(name, 384, 1536) for name in ARCHITECTURES}
    assert built == {"monarch": monarch(384, 1536, 4), "gonon": gonon(384, 1536), "lowrank": low_rank(384, 1536)}
    assert named("monarch", 384, 1536, nblocks=3) == monarch(384, 1536, 3)
    assert named("lowrank", 384, 1536, rank=7) == low_rank(384, 1536, 7)


def test_named_refuses_unknown_names_and_a_rank_that_nothing_reads() -> None:
    with pytest.raises(OptionError, match="'butterfly'; choose one of monarch, gonon, lowrank"):
        named("butterfly", 8, 8)
    with pytest.raises(OptionError, match="rank 3 with 'monarch'"):
        named("monarch", 8, 8, rank=3)


@pytest.mark.parametrize("build", [monarch, gonon, low_rank, dense])
def test_sizes_must_be_positive(build) -> None:
    with pytest.raises(PatternError):
        build(0, 384)
