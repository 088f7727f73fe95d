"""The patterns that Gonon et al. 2024 measure, by the rule of their Appendix B.1, and the numbers of their tables and figures from rows."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import pandas as pd
from factor_cases import FIRST, LAST, PRODUCT_ONLY

from flysurgery.bench import Record
from flysurgery.cli.tables import print_table

ROWS = 25088
"""128 images of 196 tokens."""

REPEATS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
SIZES = (48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
BLOCKS = [(b, c) for b, c in itertools.product(SIZES, SIZES) if b == c or b == 4 * c or c == 4 * b]
FEWER_BLOCKS = [(b, c) for b, c in BLOCKS if {b, c} not in ({256, 64}, {512, 128}, {1024, 256})]
LIMIT = 2**31 - 1
"""The most entries of x, y and the factor."""

GENERIC, LIBRARY = ["dense", "sparse"], ["bmm", "einsum", "bsr"]
SPECIAL, LAYOUTS = ["cuda", *LIBRARY], [FIRST, LAST]


def time_patterns() -> list[Record]:
    """The 627 patterns that the paper times: a = 1 with every d, and a > 1 with d in {4, 16, 64} and fewer blocks."""
    return _shuffled([*itertools.product((1,), BLOCKS, REPEATS), *itertools.product(REPEATS[1:], FEWER_BLOCKS, (4, 16, 64))])


def energy_patterns() -> list[Record]:
    """The patterns whose energy the paper measures."""
    return _shuffled(itertools.product((1, 4, 16, 32, 64), FEWER_BLOCKS, REPEATS[:12]))


def _shuffled(found: Iterable[tuple[int, tuple[int, int], int]]) -> list[Record]:
    """Shuffled, so that every beginning is a random subset, to which runs that go on add."""
    small = [(a, b, c, d) for a, (b, c), d in found if ROWS * a * d * max(b, c) <= LIMIT and a * b * c * d <= LIMIT]
    return [dict(zip("abcd", pattern, strict=True)) for pattern in random.Random(0).sample(small, len(small))]


class Claim(NamedTuple):
    """The claim that the best of ``ours`` is faster than the best of ``theirs``, in one layout or in the better of both."""

    text: str
    ours: Sequence[str]
    theirs: Sequence[str]
    layouts: Sequence[str]
    paper: Mapping[str, str]


STRUCTURED, BMM = "best of cuda, bmm, einsum, bsr < best of dense, sparse", "bmm < best of einsum, bsr, dense, sparse"
KERNEL, KERNEL_FIRST = "cuda < best of bmm, einsum, bsr, dense, sparse", "the same, batch-size-first alone"
CLAIMS = (
    Claim(STRUCTURED, SPECIAL, GENERIC, LAYOUTS, {"fp32": "99.67 %, x6.57", "fp16": "86.95 %, x8.45"}),
    Claim(BMM, ["bmm"], ["einsum", "bsr", *GENERIC], LAYOUTS, {"fp32": "92.66 %, x1.37", "fp16": "83.22 %, x1.83"}),
    Claim(KERNEL, ["cuda"], [*LIBRARY, *GENERIC], LAYOUTS, {"fp32": "88.10 %, x1.39", "fp16": "36.69 %, x1.46"}),
    Claim(KERNEL_FIRST, ["cuda"], [*LIBRARY, *GENERIC], [FIRST], {"fp32": "20.0 %, x1.28"}),
)
"""Tables 2 and 7, and 4 for the last. The paper's kernel takes the better of both layouts where ours has one. Its batch-size-last row of
Table 4 is 88.1 %, x1.39."""


class Times:
    """Milliseconds of one mode: a row for each pattern (a, b, c, d), a column for each candidate and layout."""

    def __init__(self, records: Sequence[Record], mode: str, value: str = "median_ms") -> None:
        numbers = [*"abcd", value, "share_of_bound"]
        frame = pd.DataFrame(records, columns=[*numbers, "mode", "candidate", "layout"])
        self.rows = frame[frame["mode"] == mode].assign(**{name: pd.to_numeric(frame[name]) for name in numbers})
        self.table = self.rows.pivot_table(index=[*"abcd"], columns=["candidate", "layout"], values=value, aggfunc="last")

    def of(self, name: str, layout: str) -> Any:
        """The times of one candidate, not a number where it has none."""
        missing = pd.Series(float("nan"), self.table.index)
        return self.table.get((name, layout), missing)

    def best(self, names: Sequence[str], layouts: Sequence[str] = LAYOUTS) -> Any:
        """The shortest time among candidates and layouts."""
        return pd.concat([self.of(name, layout) for name in names for layout in layouts], axis=1).min(axis=1)

    def rewriting_share(self, layout: str) -> Any:
        """The share of bmm's time that is not its product."""
        return 1 - self.of(PRODUCT_ONLY, layout) / self.of("bmm", layout)

    def reached(self, name: str) -> Any:
        """The part of the time that the bound is."""
        return self.rows[(self.rows["candidate"] == name) & (self.rows["layout"] == FIRST)]["share_of_bound"]


def count_wins(times: Times, claim: Claim) -> tuple[int, int, float | None]:
    """How often a claim holds, out of how many patterns that have both sides, and the median factor where it holds."""
    factors = (times.best(claim.theirs, claim.layouts) / times.best(claim.ours, claim.layouts)).dropna()
    won = factors[factors > 1]
    return len(won), len(factors), float(won.median()) if len(won) else None


def figures(times: Times) -> dict[str, Any]:
    """The values behind the paper's figures (float32 / half precision) for each pattern, and how near times come to their bound."""
    generic, structured = times.best(GENERIC), times.best(SPECIAL)
    found = {
        "5, 9a, 14a: share of rewriting in bmm, batch-size-first": times.rewriting_share(FIRST),
        "9b, 14b: the same, batch-size-last": times.rewriting_share(LAST),
        "6, 13: best of bmm, einsum, bsr / cuda, where structure pays": (times.best(LIBRARY) / times.best(["cuda"])).where(
            ~(generic <= structured)
        ),
        "10, 15: generic / structured": generic / structured,
        "11, 16: best of einsum, bsr / bmm": times.best(["einsum", "bsr"]) / times.best(["bmm"]),
        **{f"12, 17: {name}, first / last": times.of(name, FIRST) / times.of(name, LAST) for name in (*GENERIC, *SPECIAL)},
        **{f"bound over time of {name}, batch-size-first": times.reached(name) for name in ("cuda", "bmm")},
    }
    return {name: values.dropna() for name, values in found.items()}


def print_claims(records: Sequence[Record]) -> None:
    """Print how often the paper's claims hold, and quartiles of what its figures show."""
    wins, quartiles = [], []
    for mode in dict.fromkeys(record["mode"] for record in records):
        times = Times(records, mode)
        for claim in CLAIMS:
            won, known, factor = count_wins(times, claim)
            share = f"{won / known:.1%}" if known else ""
            wins.append((mode, claim.text, share, f"x{factor:.2f}" if factor else "", str(known), claim.paper.get(mode, "")))
        for name, values in figures(times).items():
            if len(values):
                quartiles.append((mode, name, *(f"{each:.3g}" for each in values.quantile((0.25, 0.5, 0.75))), str(len(values))))
    print_table(("mode", "claim", "holds", "median factor", "patterns", "paper (A100)"), wins, right=("holds", "median factor", "patterns"))
    titles = ("mode", "figure", "lower quartile", "median", "upper quartile", "patterns")
    print_table(titles, quartiles, right=titles[2:])


def print_energy(records: Sequence[Record]) -> None:
    """Print Figure 7: the energy of cuda over the least of bmm, einsum and bsr in either layout."""
    for mode in dict.fromkeys(record["mode"] for record in records):
        joules = Times(records, mode, "joules")
        ratios = (joules.best(["cuda"]) / joules.best(LIBRARY)).dropna()
        if len(ratios):
            share = float((ratios < 1).mean())
            print(f"{mode}: energy of cuda over the least of bmm, einsum, bsr: median {ratios.median():.2f}, below 1 on {share:.0%}")
            print(f"of {len(ratios)} patterns. Gonon et al. report a median of 0.85, and 72 %, on a V100")
