"""From the times of many patterns to the numbers and pictures of Gonon et al. 2024."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median, quantiles

from flysurgery.bench.layouts import FIRST, LAST, PRODUCT_ONLY
from flysurgery.bench.rows import Record

Key = tuple[str, ...]
Times = Mapping[tuple[str, str], float]
"""Milliseconds of one pattern by candidate and layout."""

SPECIAL, GENERIC, LIBRARY = ("cuda", "bmm", "einsum", "bsr"), ("dense", "sparse"), ("bmm", "einsum", "bsr")


@dataclass(frozen=True)
class Claim:
    """That the best of ``ours`` is faster than the best of ``theirs``, in one layout or in the better of both."""

    table: str
    text: str
    ours: Sequence[str]
    theirs: Sequence[str]
    layouts: Sequence[str]
    paper: Mapping[str, str]


CLAIMS = (
    Claim(
        *("2, 7", "best of cuda, bmm, einsum, bsr < best of dense, sparse", SPECIAL, GENERIC, (FIRST, LAST)),
        {"fp32": "99.67 %, x6.57", "fp16": "86.95 %, x8.45"},
    ),
    Claim(
        *("2, 7", "bmm < best of einsum, bsr, dense, sparse", ("bmm",), ("einsum", "bsr", *GENERIC), (FIRST, LAST)),
        {"fp32": "92.66 %, x1.37", "fp16": "83.22 %, x1.83"},
    ),
    Claim(
        *("2, 7", "cuda < best of bmm, einsum, bsr, dense, sparse", ("cuda",), (*LIBRARY, *GENERIC), (FIRST, LAST)),
        {"fp32": "88.10 %, x1.39", "fp16": "36.69 %, x1.46"},
    ),
    Claim(
        *("4", "the same, batch-size-first alone", ("cuda",), (*LIBRARY, *GENERIC), (FIRST,)),
        {"fp32": "20.0 %, x1.28"},
    ),
)
"""The paper's kernel takes the better of both layouts where ours has one; its batch-size-last row of Table 4 is 88.1 %, x1.39."""


def times_by_pattern(records: Sequence[Record], mode: str) -> dict[Key, Times]:
    """The times of each pattern that has some, by (a, b, c, d)."""
    found: dict[Key, dict[tuple[str, str], float]] = {}
    for record in records:
        if record["mode"] == mode and record["median_ms"]:
            key = tuple(record[name] for name in "abcd")
            found.setdefault(key, {})[record["candidate"], record["layout"]] = float(record["median_ms"])
    return dict(found)


def best(times: Times, names: Sequence[str], layouts: Sequence[str] = (FIRST, LAST)) -> float | None:
    """The shortest time among candidates and layouts; None where none has one."""
    return min((time for (name, layout), time in times.items() if name in names and layout in layouts), default=None)


def count_wins(times: Mapping[Key, Times], claim: Claim) -> tuple[int, int, float | None]:
    """How often a claim holds, out of how many patterns that have both sides, and the median factor where it holds."""
    pairs = [(best(each, claim.ours, claim.layouts), best(each, claim.theirs, claim.layouts)) for each in times.values()]
    known = [(ours, theirs) for ours, theirs in pairs if ours is not None and theirs is not None]
    factors = [theirs / ours for ours, theirs in known if ours < theirs]
    return len(factors), len(known), median(factors) if factors else None


def wins_table(records: Sequence[Record], modes: Sequence[str]) -> list[tuple[str, ...]]:
    """Rows of (mode, table, claim, share of wins, median factor where it holds, patterns, the paper's)."""
    rows = []
    for mode in modes:
        times = times_by_pattern(records, mode)
        for claim in CLAIMS:
            wins, known, factor = count_wins(times, claim)
            share = f"{wins / known:.1%}" if known else ""
            rows.append((mode, claim.table, claim.text, share, f"x{factor:.2f}" if factor else "", str(known), claim.paper.get(mode, "")))
    return rows


def shares_table(records: Sequence[Record], modes: Sequence[str]) -> list[tuple[str, ...]]:
    """Rows of (mode, what, lower quartile, median, upper quartile, patterns): bmm's time for rewriting, and how near a bound times come."""
    rows = []
    for mode in modes:
        times = times_by_pattern(records, mode)
        for layout in (FIRST, LAST):
            shares = [share for each in times.values() if (share := _share(each, layout)) is not None]
            rows.append((mode, f"rewriting in bmm, batch-size-{layout}, of its time", *_quartiles(shares), str(len(shares))))
        for name in ("cuda", "bmm"):
            own = [row for row in records if row["mode"] == mode and row["candidate"] == name and row["layout"] == FIRST]
            reached = [float(row["share_of_bound"]) for row in own if row["share_of_bound"]]
            rows.append((mode, f"bound over time of {name}, batch-size-first", *_quartiles(reached), str(len(reached))))
    return rows


def _quartiles(values: Sequence[float]) -> tuple[str, ...]:
    return tuple(f"{each:.0%}" for each in quantiles(values, n=4, method="inclusive")) if len(values) > 1 else ("", "", "")


def panels(records: Sequence[Record], mode: str) -> dict[str, tuple[str, str, dict[str, list[float]]]]:
    """The box plots of one mode, ready to be drawn, named after the paper's figures (float32 / half precision)."""
    times = times_by_pattern(records, mode)
    rewriting, size = "(b+c)/(bc)", "entries of the dense matrix"
    return {
        "Figures 5, 9a, 14a: share of rewriting in bmm": (
            rewriting,
            "share of time",
            _boxes(times, _rewriting, lambda t: _share(t, FIRST)),
        ),
        "Figures 9b, 14b: the same, batch-size-last": (rewriting, "share of time", _boxes(times, _rewriting, lambda t: _share(t, LAST))),
        "Figures 6, 13: cuda, where structure pays": (rewriting, "best of bmm, einsum, bsr / cuda", _boxes(times, _rewriting, _gain)),
        "Figures 10, 15: structured": (size, "generic / structured", _boxes(times, _size, _over(GENERIC, SPECIAL))),
        "Figures 11, 16: bmm": (size, "best of einsum, bsr / bmm", _boxes(times, _size, _over(("einsum", "bsr"), ("bmm",)))),
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


def _share(times: Times, layout: str) -> float | None:
    whole, product = times.get(("bmm", layout)), times.get((PRODUCT_ONLY, layout))
    return None if whole is None or product is None else (whole - product) / whole


def _over(upper: Sequence[str], lower: Sequence[str]) -> Callable[[Times], float | None]:
    def ratio(times: Times) -> float | None:
        above, below = best(times, upper), best(times, lower)
        return None if above is None or below is None else above / below

    return ratio


def _gain(times: Times) -> float | None:
    """How many times as fast as the libraries' ways ours is; None where one that knows no structure is the fastest: the paper leaves such
    patterns out.
    """
    generic, structured = best(times, GENERIC), best(times, SPECIAL)
    if generic is not None and structured is not None and generic <= structured:
        return None
    return _over(LIBRARY, ("cuda",))(times)


def _layouts(times: Mapping[Key, Times]) -> dict[str, list[float]]:
    names = dict.fromkeys(name for each in times.values() for name, _ in each if name != PRODUCT_ONLY and not name.endswith("again"))
    return {
        name: [each[name, FIRST] / each[name, LAST] for each in times.values() if (name, FIRST) in each and (name, LAST) in each]
        for name in names
    }
