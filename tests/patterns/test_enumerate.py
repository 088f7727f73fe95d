"""The enumeration against a search over all integers."""

from itertools import islice, product

import pytest

from flysurgery.errors import OptionError, PatternError
from flysurgery.patterns import Architecture, Pattern, gonon, low_rank, monarch, two_factor_architectures
from tests.patterns.brute_force import support


def by_search(m: int, n: int, max_density: float) -> set[tuple[bytes, bytes]]:
    """All pairs of supports within the budget, from every quadruple of integers that could be one."""
    lefts = [Pattern(a, b, c, d) for a, b, d in product(range(1, m + 1), repeat=3) if a * b * d == m for c in range(1, m * n + 1)]
    rights = [Pattern(a, b, c, d) for a, c, d in product(range(1, n + 1), repeat=3) if a * c * d == n for b in range(1, m * n + 1)]
    return {
        (support(left).tobytes(), support(right).tobytes())
        for left, right in product(lefts, rights)
        if left.in_features == right.out_features and (left.nnz + right.nnz) / (m * n) <= max_density
    }


@pytest.mark.parametrize(("m", "n"), [(1, 1), (2, 3), (4, 4), (6, 4), (4, 6), (5, 1)])
@pytest.mark.parametrize("max_density", [0.3, 0.5, 1.0])
def test_every_pair_of_supports_within_the_budget_comes_once(m: int, n: int, max_density: float) -> None:
    found = list(two_factor_architectures(m, n, max_density=max_density))
    supports = [(support(architecture.patterns[0]).tobytes(), support(architecture.patterns[1]).tobytes()) for architecture in found]
    assert len(set(supports)) == len(supports)
    assert set(supports) == by_search(m, n, max_density)


@pytest.mark.parametrize("shape", [(384, 384), (384, 1536)])
def test_the_known_architectures_are_among_them(shape: tuple[int, int]) -> None:
    wanted = {gonon(*shape), monarch(*shape, 4), monarch(*shape, 6), low_rank(*shape, 8), low_rank(*shape, 64)}
    budget = max(architecture.density for architecture in wanted)
    missing = set(wanted)
    for architecture in two_factor_architectures(*shape, max_density=budget):
        missing.discard(architecture)
        if not missing:
            break
    assert missing == set()


def test_the_budget_holds_and_the_order_is_fixed() -> None:
    budget = gonon(384, 1536).density
    first = list(islice(two_factor_architectures(384, 1536, max_density=budget), 20_000))
    assert all(architecture.shape == (384, 1536) and architecture.density <= budget for architecture in first)
    assert first == list(islice(two_factor_architectures(384, 1536, max_density=budget), 20_000))
    assert first[:2] == [Architecture.of((1, 384, 1, 1), (1, 1, 1536, 1)), Architecture.of((1, 384, 2, 1), (1, 2, 1536, 1))]


@pytest.mark.parametrize("max_density", [0.0, -0.5, 1.01, float("nan"), float("inf")])
def test_a_budget_outside_its_range_and_sizes_of_zero_are_refused_at_once(max_density: float) -> None:
    with pytest.raises(OptionError, match="above 0 and at most 1"):
        two_factor_architectures(8, 8, max_density=max_density)
    with pytest.raises(PatternError, match="0x8"):
        two_factor_architectures(0, 8, max_density=0.5)
