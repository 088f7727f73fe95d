"""The patterns that Gonon et al. 2024 measure, by the rule of their Appendix B.1, and their tables and figures made from rows."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from factor_cases import FIRST, LAST, PRODUCT_ONLY

from flysurgery.bench import Record
from flysurgery.bench.plots import pyplot, save
from flysurgery.patterns import Pattern

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


def time_patterns() -> list[Pattern]:
    """The 627 patterns that the paper times: a = 1 with every d, and a > 1 with d in {4, 16, 64} and fewer blocks."""
    return _small([*itertools.product((1,), BLOCKS, REPEATS), *itertools.product(REPEATS[1:], FEWER_BLOCKS, (4, 16, 64))])


def energy_patterns() -> list[Pattern]:
    """The patterns whose energy the paper measures."""
    return _small(itertools.product((1, 4, 16, 32, 64), FEWER_BLOCKS, REPEATS[:12]))


def shuffled(patterns: list[Pattern], seed: int) -> list[Pattern]:
    """The patterns shuffled, so that every beginning is a random subset, to which runs that go on add."""
    return random.Random(seed).sample(patterns, len(patterns))


def _small(found: Iterable[tuple[int, tuple[int, int], int]]) -> list[Pattern]:
    return [Pattern(a, b, c, d) for a, (b, c), d in found if ROWS * a * d * max(b, c) <= LIMIT and a * b * c * d <= LIMIT]


@dataclass(frozen=True)
class Claim:
    """The claim that the best of ``ours`` is faster than the best of ``theirs``, in one layout or in the better of both."""

    table: str
    text: str
    ours: Sequence[str]
    theirs: Sequence[str]
    layouts: Sequence[str]
    paper: Mapping[str, str]


STRUCTURED, BMM = "best of cuda, bmm, einsum, bsr < best of dense, sparse", "bmm < best of einsum, bsr, dense, sparse"
KERNEL, KERNEL_FIRST = "cuda < best of bmm, einsum, bsr, dense, sparse", "the same, batch-size-first alone"
CLAIMS = (
    Claim("2, 7", STRUCTURED, SPECIAL, GENERIC, LAYOUTS, {"fp32": "99.67 %, x6.57", "fp16": "86.95 %, x8.45"}),
    Claim("2, 7", BMM, ["bmm"], ["einsum", "bsr", *GENERIC], LAYOUTS, {"fp32": "92.66 %, x1.37", "fp16": "83.22 %, x1.83"}),
    Claim("2, 7", KERNEL, ["cuda"], [*LIBRARY, *GENERIC], LAYOUTS, {"fp32": "88.10 %, x1.39", "fp16": "36.69 %, x1.46"}),
    Claim("4", KERNEL_FIRST, ["cuda"], [*LIBRARY, *GENERIC], [FIRST], {"fp32": "20.0 %, x1.28"}),
)
"""The paper's kernel takes the better of both layouts where ours has one. Its batch-size-last row of Table 4 is 88.1 %, x1.39."""


class Times:
    """Milliseconds of one mode: a row for each pattern (a, b, c, d), a column for each candidate and layout."""

    def __init__(self, records: Sequence[Record], mode: str) -> None:
        numbers = [*"abcd", "median_ms", "share_of_bound"]
        frame = pd.DataFrame(records, columns=[*numbers, "mode", "candidate", "layout"])
        self.rows = frame[frame["mode"] == mode].assign(**{name: pd.to_numeric(frame[name]) for name in numbers})
        self.table = self.rows.pivot_table(index=[*"abcd"], columns=["candidate", "layout"], values="median_ms", aggfunc="last")

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


def wins_table(records: Sequence[Record], modes: Sequence[str]) -> list[tuple[str, ...]]:
    """Rows of (mode, table, claim, share of wins, median factor where it holds, patterns, the paper's)."""
    rows = []
    for mode in modes:
        times = Times(records, mode)
        for claim in CLAIMS:
            wins, known, factor = count_wins(times, claim)
            share = f"{wins / known:.1%}" if known else ""
            rows.append((mode, claim.table, claim.text, share, f"x{factor:.2f}" if factor else "", str(known), claim.paper.get(mode, "")))
    return rows


def shares_table(records: Sequence[Record], modes: Sequence[str]) -> list[tuple[str, ...]]:
    """Rows of (mode, what, lower quartile, median, upper quartile, patterns).

    They say what share of its time bmm takes for rewriting, and how near times come to their bound.
    """
    rows = []
    for mode in modes:
        times = Times(records, mode)
        shares = {f"rewriting in bmm, batch-size-{layout}, of its time": times.rewriting_share(layout) for layout in LAYOUTS}
        shares |= {f"bound over time of {name}, batch-size-first": times.reached(name) for name in ("cuda", "bmm")}
        for what, values in shares.items():
            quartiles = [f"{each:.0%}" for each in values.quantile((0.25, 0.5, 0.75))] if values.count() > 1 else [""] * 3
            rows.append((mode, what, *quartiles, str(values.count())))
    return rows


def panels(records: Sequence[Record], mode: str) -> dict[str, tuple[str, str, dict[str, list[float]]]]:
    """The box plots of one mode, ready to be drawn, named after the paper's figures (float32 / half precision)."""
    times = Times(records, mode)
    a, b, c, d = (times.table.index.get_level_values(name) for name in "abcd")
    rewriting, size = (b + c) / (b * c), [2.0 ** int(entries).bit_length() for entries in a * b * d * a * c * d]
    generic, structured = times.best(GENERIC), times.best(SPECIAL)
    gain = (times.best(LIBRARY) / times.best(["cuda"])).where(~(generic <= structured))
    layouts = {name: times.of(name, FIRST) / times.of(name, LAST) for name in (*GENERIC, *SPECIAL)}
    over_bmm = times.best(["einsum", "bsr"]) / times.best(["bmm"])
    moving, entries, share = "(b+c)/(bc)", "entries of the dense matrix", "share of time"
    by_layout = {name: list(each.dropna()) for name, each in layouts.items()}
    return {
        "Figures 5, 9a, 14a: share of rewriting in bmm": (moving, share, boxes(times.rewriting_share(FIRST), rewriting)),
        "Figures 9b, 14b: the same, batch-size-last": (moving, share, boxes(times.rewriting_share(LAST), rewriting)),
        "Figures 6, 13: cuda, where structure pays": (moving, "best of bmm, einsum, bsr / cuda", boxes(gain, rewriting)),
        "Figures 10, 15: structured": (entries, "generic / structured", boxes(generic / structured, size)),
        "Figures 11, 16: bmm": (entries, "best of einsum, bsr / bmm", boxes(over_bmm, size)),
        "Figures 12, 17: layouts": ("", "batch-size-first / batch-size-last", by_layout),
    }


def boxes(values: Any, labels: Any) -> dict[str, list[float]]:
    """The values that there are under each label, labels in order."""
    frame = pd.DataFrame({"value": list(values), "label": list(labels)}).dropna()
    return {f"{label:.3g}": list(each) for label, each in frame.groupby("label")["value"]}


def energy_boxes(records: Sequence[Record]) -> dict[str, list[float]]:
    """The energy of cuda over the least of bmm, einsum and bsr in either layout, by d(b+c)/(bc)."""
    frame = pd.DataFrame(records, columns=["what", "mode", "rewriting", "candidate", "joules"])
    frame = frame.assign(**{name: pd.to_numeric(frame[name]) for name in ("rewriting", "joules")})
    is_ours = (frame["candidate"] == "cuda").map({True: "ours", False: "theirs"})
    least = frame.pivot_table(index=["rewriting", "what", "mode"], columns=is_ours, values="joules", aggfunc="min")
    least = least.reindex(columns=["ours", "theirs"])
    labels = [float(f"{each:.2g}") for each in least.index.get_level_values("rewriting")]
    return boxes(least["ours"] / least["theirs"], labels)


def draw_boxes(found: Mapping[str, tuple[str, str, Mapping[str, Sequence[float]]]], path: Path, *, title: str) -> None:
    """Draw box plots side by side: ``found`` maps a title to the axes' labels and the values under each box.

    The line is the median, the box the quartiles, the whiskers the 5th and 95th percentile, as in Gonon et al. 2024.
    """
    figure, grid = pyplot().subplots(1, len(found), figsize=(5.2 * len(found), 3.8), layout="constrained", squeeze=False)
    for axes, (name, (across, up, panel)) in zip(grid.flat, found.items(), strict=True):
        filled = {label: values for label, values in panel.items() if values}
        axes.boxplot(list(filled.values()), whis=(5, 95), showfliers=False)
        axes.set_xticks(range(1, len(filled) + 1), list(filled), rotation=90, fontsize=7)
        axes.set_title(name, fontsize=9)
        axes.set(xlabel=across, ylabel=up)
        axes.axhline(1, color="grey", linewidth=0.8)
    figure.suptitle(title, fontsize=10)
    save(figure, path)
