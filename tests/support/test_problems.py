"""Covering sets leave out no pair of values."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import pytest

from tests.support.problems import PATTERNS, all_pairs, in_third


def pairs(cases: Iterable[tuple[object, ...]]) -> set[tuple[object, ...]]:
    """Every two axes with the values that some case has there."""
    return {(n, m, case[n], case[m]) for case in cases for n, m in itertools.combinations(range(len(case)), 2)}


def test_thirds_of_the_patterns_hold_all_pairs_and_are_the_whole_together() -> None:
    thirds = [[pattern for pattern in PATTERNS if in_third(pattern, turn)] for turn in range(3)]
    assert sorted(map(str, itertools.chain(*thirds))) == sorted(map(str, PATTERNS))
    for third in thirds:
        assert pairs((p.a, p.d, (p.b, p.c)) for p in third) == pairs((p.a, p.d, (p.b, p.c)) for p in PATTERNS)


@pytest.mark.parametrize("sizes", [(3, 3, 3), (6, 3, 3), (3, 5, 3), (4, 3, 2)])
def test_all_pairs_are_there(sizes: tuple[int, int, int]) -> None:
    axes = [range(size) for size in sizes]
    cases = all_pairs(*axes)
    assert pairs(cases) == pairs(itertools.product(*axes)) and len(cases) == sizes[0] * sizes[1]
