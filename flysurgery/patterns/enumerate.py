"""Every two-factor architecture of a matrix within a budget of parameters."""

from __future__ import annotations

from collections.abc import Iterator
from math import lcm

from flysurgery.errors import OptionError, PatternError
from flysurgery.patterns.architecture import Architecture
from flysurgery.patterns.pattern import Pattern


def two_factor_architectures(out_features: int, in_features: int, *, max_density: float) -> Iterator[Architecture]:
    """Yield every architecture ``(a1,b1,c1,d1),(a2,b2,c2,d2)`` of an m×n matrix with a density of at most ``max_density``.

    "Every" means each pair of supports once, chainable or not: all integers with ``a1*b1*d1 = m``, ``a2*c2*d2 = n`` and
    ``a1*c1*d1 = a2*b2*d2``, the inner size k. The density is ``k*(b1+c2)/(m*n)``, so the budget bounds k. Diagonal factors
    with the same product a·d have one support; they appear as ``(a,1,1,1)``. Block ranks above the smaller side of a block
    are not filtered out: ``architecture.ranks`` tells.

    The order is fixed: by the number of row classes of the left factor, then of column classes of the right one (few large
    blocks first, so low-rank pairs come first), then by k, a1, a2.

    There are many: a 384×1536 matrix has about 480 000 at a density of 1/4. Costs a few microseconds for each.

    Raises:
        OptionError: ``max_density`` is not in (0, 1].
        PatternError: a size is not positive.
    """
    if not 0.0 < max_density <= 1.0:
        raise OptionError(f"max_density is a share of the dense parameters, above 0 and at most 1, got {max_density!r}")
    if min(out_features, in_features) < 1:
        raise PatternError(f"a matrix has positive sizes, got {out_features}x{in_features}")
    return _within_budget(out_features, in_features, max_density)


def _within_budget(m: int, n: int, max_density: float) -> Iterator[Architecture]:
    for row_classes in _divisors(m):
        for column_classes in _divisors(n):
            b1, c2 = m // row_classes, n // column_classes
            step = lcm(row_classes, column_classes)
            inner = step
            while inner * (b1 + c2) / (m * n) <= max_density:
                lefts = [Pattern(a, b1, inner // row_classes, d) for a, d in _splits(row_classes, b1, inner // row_classes)]
                rights = [Pattern(a, inner // column_classes, c2, d) for a, d in _splits(column_classes, inner // column_classes, c2)]
                for left in lefts:
                    for right in rights:
                        yield Architecture((left, right))
                inner += step


def _splits(blocks: int, b: int, c: int) -> list[tuple[int, int]]:
    """The pairs (a, d) with ``a*d = blocks`` whose supports with b×c blocks differ."""
    if b == 1 and c == 1:
        return [(blocks, 1)]
    return [(a, blocks // a) for a in _divisors(blocks)]


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]
