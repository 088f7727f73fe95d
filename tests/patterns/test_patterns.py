"""Patterns and architectures against their supports written out; the named ones are those of Gonon et al. 2024, Table 8 and B.7."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flysurgery.errors import OptionError, PatternError
from flysurgery.patterns import (
    ARCHITECTURES,
    MAX_FEATURES,
    Architecture,
    Pattern,
    check_fits,
    deformable,
    family_of,
    gonon,
    kaleidoscope,
    low_rank,
    monarch,
    named,
    product_pattern,
    square_dyadic,
)
from tests.patterns.brute_force import path_counts, support
from tests.patterns.strategies import pairs, patterns

PAPERS = [Architecture.parse(text) for text in ("(1,192,48,2),(2,48,192,1)", "(1,768,192,2),(6,64,64,1)", "(1,128,128,3),(6,64,256,1)")]
"""Of the square, up and down layers of ViT-S/16."""
OTHER = ("(1,6,10,1)", "(1,2,2,2),(2,2,2,1),(1,2,2,2),(2,2,2,1)", "(1,4,2,2),(2,2,6,1)")


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
    counts = path_counts(architecture)
    assert architecture.shape == (left @ right).shape and architecture.inner_features == (left.shape[1],)
    assert architecture.num_parameters == left.sum() + right.sum()
    assert architecture.density == pytest.approx((left.sum() + right.sum()) / (left @ right).size)
    assert np.array_equal(path_counts(architecture.transpose), counts.T)
    assert Architecture.parse(str(architecture)) == Architecture.from_json(architecture.to_json()) == architecture
    if architecture.is_chainable:
        (rank,) = set(counts[counts > 0].tolist())
        assert np.array_equal(counts, rank * support(product_pattern(*architecture)))
    else:
        with pytest.raises(PatternError, match="not chainable"):
            product_pattern(*architecture)


@given(st.integers(1, 60), st.integers(1, 60), st.integers(1, 6))
def test_monarch_is_the_row_of_the_table(x: int, y: int, p: int) -> None:
    m, n = x * p, y * p
    k, architecture = min(m, n), monarch(m, n, p)
    assert architecture.to_json() == [[1, m // p, k // p, p], [p, k // p, n // p, 1]]
    assert architecture.density == pytest.approx(k * (m + n) / p / (m * n))
    assert p == 1 or family_of(architecture) == "monarch"
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


@given(st.integers(1, 5), st.integers(1, 4), st.integers(0, 9), st.booleans())
def test_butterflies_are_the_rows_of_the_table_with_one_factor_stretched(depth: int, block: int, more: int, is_tall: bool) -> None:
    p = 2 ** (depth - 1)
    rows = [[2**i, 2, 2, p // 2**i] for i in range(depth)]
    dyadic, twice = square_dyadic(2 * p), kaleidoscope(2 * p)
    assert dyadic.to_json() == rows and twice.to_json() == rows + rows[::-1] and twice.is_chainable == (depth == 1)
    k, larger = 2 * p * block, p * (2 * block + more)
    found = deformable(larger, k, p) if is_tall else deformable(k, larger, p)
    rows = [[a, block * b, block * c, d] for a, b, c, d in rows]
    rows[0 if is_tall else -1][1 if is_tall else 2] = larger // p
    assert found.to_json() == rows and found.shape == ((larger, k) if is_tall else (k, larger))
    assert found.is_chainable and len({*path_counts(found).flatten().tolist()}) == 1, "full support and one rank"
    assert more == 0 or depth == 1 or family_of(found) == ("monarch" if depth == 2 else "deformable")


@pytest.mark.parametrize(
    ("name", "size", "options", "expected"),
    [
        *(("gonon", found.shape, {}, str(found)) for found in PAPERS),
        ("monarch", (384, 1536), {"nblocks": 3}, str(monarch(384, 1536, 3))),
        ("lowrank", (384, 1536), {}, "(1,384,152,1),(1,152,1536,1)"),
        ("lowrank", (64, 2), {}, "(1,64,1,1),(1,1,2,1)"),
        ("lowrank", (384, 1536), {"rank": 7}, "(1,384,7,1),(1,7,1536,1)"),
        ("deformable", (384, 1536), {}, "(1,96,96,4),(2,96,96,2),(4,96,384,1)"),
        ("block", (384, 384), {"nblocks": 2}, str(monarch(384, 384, 2))),
        ("dyadic", (8, 8), {}, str(square_dyadic(8))),
        ("kaleidoscope", (8, 8), {}, str(kaleidoscope(8))),
    ],
)
def test_names_make_their_family(name: str, size: tuple[int, int], options: dict[str, int], expected: str) -> None:
    found = named(name, *size, **options)
    assert str(found) == expected
    assert name in ARCHITECTURES and (name == "block" or family_of(found).replace(" ", "") == name)
    assert all(family_of(Architecture.parse(text)) == "other" for text in OTHER)


FOUR = "four positive integers"
TEXTS = ("", "monarch", "(1,2,3)", "(1,2,3,4),", "(1,2,3,4)(1,2,3,4)", "(1,2,-3,4)", "__import__('os')")
ROWS = (None, 3, "abcd", [[1, 2, 3]], [1, 2, 3, 4], {"a": 1}, [[1, 2, 3, None]])
ENTRIES = ((0, 1, 1, 1), (1, -2, 1, 1), (1, 1, 1.0, 1), (1, 1, 1, True), (1, "2", 1, 1))
COUNTS: tuple[Any, ...] = (0, -4, 2.0, True)
NO_GONON = ((1152, 384), (385, 384), (384, 1000), (4, 1537))


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        *((lambda entries=entries: Pattern(*entries), PatternError, FOUR) for entries in ENTRIES),
        *((lambda text=text: Architecture.parse(text), PatternError, "expected patterns such as") for text in TEXTS),
        *((lambda rows=rows: Architecture.from_json(rows), PatternError, "four") for rows in ROWS),
        (lambda: Pattern(MAX_FEATURES, 2, 1, 1), PatternError, str(MAX_FEATURES)),
        (lambda: Architecture(()), PatternError, "at least one"),
        (lambda: Architecture.of((1, 2, 6, 1), (2, 2, 2, 1)), PatternError, r"takes 6 features .* gives 4"),
        (lambda: check_fits(PAPERS[2], 1536, 384), PatternError, r"384x1536 matrix, the layer is 1536x384"),
        (lambda: low_rank(8, 9, 9), PatternError, "8x9 .* rank 9"),
        (lambda: monarch(384, 1536, 5), PatternError, "nblocks 5 .* 384x1536 .* that do: 4 and 6$"),
        (lambda: monarch(12, 18, 9), PatternError, "that do: 6$"),
        *(
            (lambda make=make, n=n: make(8, 8, n), OptionError, "must be a positive integer")
            for make in (monarch, low_rank)
            for n in COUNTS
        ),
        (lambda: gonon(4096, 1024), PatternError, "4096x1024 .* multiple of 6, got 1024"),
        *((lambda m=m, n=n: gonon(m, n), PatternError, f"got {m}x{n}") for m, n in NO_GONON),
        *((lambda n=n: square_dyadic(n), PatternError, rf"needs n = 2\^L with L >= 1, got a {n}x{n}") for n in (1, 384)),
        (lambda: named("dyadic", 64, 256), PatternError, "dyadic is for square matrices, got 64x256; use deformable"),
        (lambda: deformable(96, 96, 3), PatternError, "nblocks 3 .* 96x96 matrix: it must be a power of two"),
        (lambda: deformable(96, 52, 4), PatternError, "divides 96, and its double must divide 52"),
        (lambda: named("butterfly", 8, 8), OptionError, "'butterfly'; choose one of monarch, gonon, lowrank"),
        (lambda: named("monarch", 8, 8, rank=3), OptionError, "rank 3 with 'monarch'"),
        *((lambda build=build: build(0, 384), PatternError, "0") for build in (monarch, gonon, low_rank, deformable)),
    ],
)
def test_what_cannot_be_built_is_one_sentence(make: Callable[[], object], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        make()
