"""The patterns that Gonon et al. 2024 measure, by the rule of their Appendix B.1, and their tables and figures made from rows."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median, quantiles

from flysurgery.bench.factor import FIRST, LAST, PRODUCT_ONLY
from flysurgery.bench.measuring import AGAIN
from flysurgery.bench.rows import Record
from flysurgery.patterns import Pattern

ROWS = 25088
"""128 images of 196 tokens."""

REPEATS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
SIZES = (48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
BLOCKS = [(b, c) for b, c in itertools.product(SIZES, SIZES) if b == c or b == 4 * c or c == 4 * b]
FEWER_BLOCKS = [(b, c) for b, c in BLOCKS if {b, c} not in ({256, 64}, {512, 128}, {1024, 256})]
LIMIT = 2**31 - 1
"""The most entries of x, y and the factor."""

SPECIAL, GENERIC, LIBRARY = ("cuda", "bmm", "einsum", "bsr"), ("dense", "sparse"), ("bmm", "einsum", "bsr")

Key = tuple[str, ...]
"""A pattern, as the texts of (a, b, c, d)."""

Times = Mapping[tuple[str, str], float]
"""Milliseconds of one pattern by candidate and layout."""


def time_patterns() -> list[Pattern]:
    """List the 627 patterns that the paper times: a = 1 with every d, and a > 1 with d in {4, 16, 64} and fewer blocks."""
    return _small([*itertools.product((1,), BLOCKS, REPEATS), *itertools.product(REPEATS[1:], FEWER_BLOCKS, (4, 16, 64))])


def energy_patterns() -> list[Pattern]:
    """List the patterns whose energy the paper measures."""
    return _small(itertools.product((1, 4, 16, 32, 64), FEWER_BLOCKS, REPEATS[:12]))


def shuffled(patterns: list[Pattern], seed: int) -> list[Pattern]:
    """Shuffle patterns, so that every beginning is a random subset, to which runs that go on add."""
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
    Claim("2, 7", STRUCTURED, SPECIAL, GENERIC, (FIRST, LAST), {"fp32": "99.67 %, x6.57", "fp16": "86.95 %, x8.45"}),
    Claim("2, 7", BMM, ("bmm",), ("einsum", "bsr", *GENERIC), (FIRST, LAST), {"fp32": "92.66 %, x1.37", "fp16": "83.22 %, x1.83"}),
    Claim("2, 7", KERNEL, ("cuda",), (*LIBRARY, *GENERIC), (FIRST, LAST), {"fp32": "88.10 %, x1.39", "fp16": "36.69 %, x1.46"}),
    Claim("4", KERNEL_FIRST, ("cuda",), (*LIBRARY, *GENERIC), (FIRST,), {"fp32": "20.0 %, x1.28"}),
)
"""The paper's kernel takes the better of both layouts where ours has one. Its batch-size-last row of Table 4 is 88.1 %, x1.39."""


def times_by_pattern(records: Sequence[Record], mode: str) -> dict[Key, Times]:
    """Collect the times of each pattern that has some, by (a, b, c, d)."""
    found: dict[Key, dict[tuple[str, str], float]] = {}
    for record in records:
        if record["mode"] == mode and record["median_ms"]:
            key = tuple(record[name] for name in "abcd")
            found.setdefault(key, {})[record["candidate"], record["layout"]] = float(record["median_ms"])
    return dict(found)


def best(times: Times, names: Sequence[str], layouts: Sequence[str] = (FIRST, LAST)) -> float | None:
    """Find the shortest time among candidates and layouts; None where none has one."""
    return min((time for (name, layout), time in times.items() if name in names and layout in layouts), default=None)


def count_wins(times: Mapping[Key, Times], claim: Claim) -> tuple[int, int, float | None]:
    """Count how often a claim holds, out of how many patterns that have both sides, and take the median factor where it holds."""
    pairs = [(best(each, claim.ours, claim.layouts), best(each, claim.theirs, claim.layouts)) for each in times.values()]
    known = [(ours, theirs) for ours, theirs in pairs if ours is not None and theirs is not None]
    factors = [theirs / ours for ours, theirs in known if ours < theirs]
    return len(factors), len(known), median(factors) if factors else None


def wins_table(records: Sequence[Record], modes: Sequence[str]) -> list[tuple[str, ...]]:
    """Make rows of (mode, table, claim, share of wins, median factor where it holds, patterns, the paper's)."""
    rows = []
    for mode in modes:
        times = times_by_pattern(records, mode)
        for claim in CLAIMS:
            wins, known, factor = count_wins(times, claim)
            share = f"{wins / known:.1%}" if known else ""
            rows.append((mode, claim.table, claim.text, share, f"x{factor:.2f}" if factor else "", str(known), claim.paper.get(mode, "")))
    return rows


def shares_table(records: Sequence[Record], modes: Sequence[str]) -> list[tuple[str, ...]]:
    """Make rows of (mode, what, lower quartile, median, upper quartile, patterns).

    They say what share of its time bmm takes for rewriting, and how near times come to their bound.
    """
    rows = []
    for mode in modes:
        times = times_by_pattern(records, mode)
        for layout in (FIRST, LAST):
            shares = [share for each in times.values() if (share := _rewriting_share(layout)(each)) is not None]
            rows.append((mode, f"rewriting in bmm, batch-size-{layout}, of its time", *_quartiles(shares), str(len(shares))))
        for name in ("cuda", "bmm"):
            own = [row for row in records if row["mode"] == mode and row["candidate"] == name and row["layout"] == FIRST]
            reached = [float(row["share_of_bound"]) for row in own if row["share_of_bound"]]
            rows.append((mode, f"bound over time of {name}, batch-size-first", *_quartiles(reached), str(len(reached))))
    return rows


def _quartiles(values: Sequence[float]) -> tuple[str, ...]:
    return tuple(f"{each:.0%}" for each in quantiles(values, n=4, method="inclusive")) if len(values) > 1 else ("", "", "")


def panels(records: Sequence[Record], mode: str) -> dict[str, tuple[str, str, dict[str, list[float]]]]:
    """Make the box plots of one mode, ready to be drawn, named after the paper's figures (float32 / half precision)."""
    times = times_by_pattern(records, mode)

    def by_rewriting(value: Callable[[Times], float | None]) -> dict[str, list[float]]:
        return _boxes(times, _rewriting, value)

    def by_size(value: Callable[[Times], float | None]) -> dict[str, list[float]]:
        return _boxes(times, _size, value)

    rewriting, size, share = "(b+c)/(bc)", "entries of the dense matrix", "share of time"
    over_special, over_bmm = _over(GENERIC, SPECIAL), _over(("einsum", "bsr"), ("bmm",))
    return {
        "Figures 5, 9a, 14a: share of rewriting in bmm": (rewriting, share, by_rewriting(_rewriting_share(FIRST))),
        "Figures 9b, 14b: the same, batch-size-last": (rewriting, share, by_rewriting(_rewriting_share(LAST))),
        "Figures 6, 13: cuda, where structure pays": (rewriting, "best of bmm, einsum, bsr / cuda", by_rewriting(_gain)),
        "Figures 10, 15: structured": (size, "generic / structured", by_size(over_special)),
        "Figures 11, 16: bmm": (size, "best of einsum, bsr / bmm", by_size(over_bmm)),
        "Figures 12, 17: layouts": ("", "batch-size-first / batch-size-last", _layouts(times)),
    }


def _boxes(times: Mapping[Key, Times], group: Callable[[Key], float], value: Callable[[Times], float | None]) -> dict[str, list[float]]:
    found: dict[float, list[float]] = {}
    for key, each in times.items():
        number = value(each)
        if number is not None:
            found.setdefault(group(key), []).append(number)
    return {f"{label:.3g}": found[label] for label in sorted(found)}


def _rewriting(key: Key) -> float:
    _, b, c, _ = map(int, key)
    return (b + c) / (b * c)


def _size(key: Key) -> float:
    a, b, c, d = map(int, key)
    return float(2 ** (a * b * d * a * c * d).bit_length())


def _rewriting_share(layout: str) -> Callable[[Times], float | None]:
    def share(times: Times) -> float | None:
        whole, product = times.get(("bmm", layout)), times.get((PRODUCT_ONLY, layout))
        return None if whole is None or product is None else (whole - product) / whole

    return share


def _over(upper: Sequence[str], lower: Sequence[str]) -> Callable[[Times], float | None]:
    def ratio(times: Times) -> float | None:
        above, below = best(times, upper), best(times, lower)
        return None if above is None or below is None else above / below

    return ratio


def _gain(times: Times) -> float | None:
    """Give how many times as fast as the libraries' ways ours is; None where a way without structure is the fastest, as in the paper."""
    generic, structured = best(times, GENERIC), best(times, SPECIAL)
    if generic is not None and structured is not None and generic <= structured:
        return None
    return _over(LIBRARY, ("cuda",))(times)


def _layouts(times: Mapping[Key, Times]) -> dict[str, list[float]]:
    names = dict.fromkeys(name for each in times.values() for name, _ in each if name != PRODUCT_ONLY and not name.endswith(AGAIN))
    return {
        name: [each[name, FIRST] / each[name, LAST] for each in times.values() if (name, FIRST) in each and (name, LAST) in each]
        for name in names
    }


def energy_boxes(records: Sequence[Record]) -> tuple[dict[str, list[float]], list[float]]:
    """Give the energy of cuda over the least of bmm, einsum and bsr in either layout, by d(b+c)/(bc), and all of these ratios."""
    ours: dict[tuple[str, str], float] = {}
    theirs: dict[tuple[str, str], float] = {}
    label: dict[tuple[str, str], str] = {}
    for record in records:
        if not record["rewriting"] or not record["joules"]:
            continue
        key, joules = (record["what"], record["mode"]), float(record["joules"])
        label[key] = f"{float(record['rewriting']):.2g}"
        side = ours if record["candidate"] == "cuda" else theirs
        side[key] = min(joules, side.get(key, joules))
    boxes: dict[str, list[float]] = {}
    for key in sorted(ours.keys() & theirs.keys(), key=lambda key: float(label[key])):
        boxes.setdefault(label[key], []).append(ours[key] / theirs[key])
    return boxes, [ratio for ratios in boxes.values() for ratio in ratios]
