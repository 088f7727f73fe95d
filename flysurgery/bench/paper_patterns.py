"""The patterns that Gonon et al. 2024 measure: the rule of their Appendix B.1, for time and for energy."""

from __future__ import annotations

import itertools
import random

from flysurgery.patterns import Pattern

ROWS = 25088
"""128 images of 196 tokens."""

REPEATS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
SIZES = (48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
SKIPPED = {(256, 64), (512, 128), (1024, 256)}
LIMIT = 2**31 - 1
"""Most entries of x, y and the factor."""


def time_patterns() -> list[Pattern]:
    """The 627 patterns whose times they take: a = 1 with every d, and a > 1 with d in {4, 16, 64} and fewer blocks."""
    single = [(1, b, c, d) for (b, c), d in itertools.product(_blocks(), REPEATS)]
    repeated = itertools.product(REPEATS[1:], (pair for pair in _blocks() if not _skipped(pair)), (4, 16, 64))
    return _small([*single, *((a, b, c, d) for a, (b, c), d in repeated)])


def energy_patterns() -> list[Pattern]:
    """The patterns whose energy they take."""
    repeated = itertools.product((1, 4, 16, 32, 64), (pair for pair in _blocks() if not _skipped(pair)), REPEATS[:12])
    return _small([(a, b, c, d) for a, (b, c), d in repeated])


def shuffled(patterns: list[Pattern], seed: int) -> list[Pattern]:
    """In an order that makes every beginning a random subset: runs that go on add to it."""
    return random.Random(seed).sample(patterns, len(patterns))


def _blocks() -> list[tuple[int, int]]:
    return [(b, c) for b, c in itertools.product(SIZES, SIZES) if b == c or b == 4 * c or c == 4 * b]


def _skipped(pair: tuple[int, int]) -> bool:
    return (max(pair), min(pair)) in SKIPPED


def _small(rows: list[tuple[int, int, int, int]]) -> list[Pattern]:
    return [Pattern(a, b, c, d) for a, b, c, d in rows if ROWS * a * d * max(b, c) <= LIMIT and a * b * c * d <= LIMIT]
