"""The patterns of the paper, and the shares of wins and pictures made of their times."""

from __future__ import annotations

from typing import Any

from flysurgery.bench.paper_patterns import (
    CLAIMS,
    ROWS,
    count_wins,
    energy_patterns,
    panels,
    shares_table,
    shuffled,
    time_patterns,
    times_by_pattern,
    wins_table,
)
from flysurgery.patterns import Pattern


def test_the_patterns_follow_the_papers_rule() -> None:
    patterns = time_patterns()
    assert len(patterns) == len(set(patterns)) == 627
    assert Pattern(1, 1024, 256, 2) in patterns and Pattern(2, 1024, 256, 4) not in patterns  # too near to another ratio
    assert Pattern(2, 48, 48, 4) in patterns and Pattern(2, 48, 48, 8) not in patterns
    assert all(each.b in (each.c, 4 * each.c) or each.c == 4 * each.b for each in patterns)
    assert max(ROWS * max(each.shape) for each in patterns) < 2**31
    assert {each.a for each in energy_patterns()} == {1, 4, 16, 32, 64}
    first, again, other = shuffled(patterns, 0), shuffled(patterns, 0), shuffled(patterns, 1)
    assert first == again != other and set(first) == set(patterns)


def record(pattern: str, candidate: str, layout: str, ms: float | None) -> dict[str, Any]:
    times = {"median_ms": "", "share_of_bound": ""} if ms is None else {"median_ms": str(ms), "share_of_bound": str(1 / ms)}
    return dict(zip("abcd", pattern.split(","), strict=True)) | {"mode": "fp32", "candidate": candidate, "layout": layout} | times


ONE, TWO = "1,48,48,4", "2,64,64,4"
RECORDS = [
    *(record(ONE, name, "first", ms) for name, ms in (("cuda", 1.0), ("bmm", 4.0), ("einsum", 3.0), ("dense", 9.0), ("sparse", None))),
    *(record(ONE, name, "last", ms) for name, ms in (("bmm", 2.0), ("dense", 8.0), ("bmm product only", 1.5))),
    *(record(TWO, name, "first", ms) for name, ms in (("cuda", 5.0), ("bmm", 4.0), ("bmm product only", 1.0))),
]


def test_a_claim_counts_the_better_layout_and_only_patterns_with_both_sides() -> None:
    times = times_by_pattern(RECORDS, "fp32")
    structured, bmm, kernel, first_only = CLAIMS
    assert count_wins(times, structured) == (1, 1, 8.0)  # dense was left out of the second pattern
    assert count_wins(times, bmm) == (1, 1, 1.5)  # 3 over 2, batch-size-last
    assert count_wins(times, kernel) == (1, 2, 2.0)
    assert count_wins(times, first_only) == (1, 2, 3.0)  # without the bmm that is faster with the batch last
    assert ("fp32", "2, 7", kernel.text, "50.0%", "x2.00", "2", "88.10 %, x1.39") in wins_table(RECORDS, ["fp32"])
    assert times_by_pattern(RECORDS, "fp16") == {}


def test_shares_have_quartiles_where_there_are_two_patterns() -> None:
    whole = [record(name, "bmm", "first", 4.0) for name in (ONE, TWO)]
    ready = [record(name, "bmm product only", "first", ms) for name, ms in ((ONE, 2.0), (TWO, 3.0))]
    found = shares_table([*whole, *ready], ["fp32"])
    assert found == [
        ("fp32", "rewriting in bmm, batch-size-first, of its time", "31%", "38%", "44%", "2"),  # 1/4 and 1/2
        ("fp32", "rewriting in bmm, batch-size-last, of its time", "", "", "", "0"),
        ("fp32", "bound over time of cuda, batch-size-first", "", "", "", "0"),
        ("fp32", "bound over time of bmm, batch-size-first", "25%", "25%", "25%", "2"),
    ]


def test_pictures_group_by_the_share_of_moving_and_the_gain_leaves_out_what_dense_wins() -> None:
    boxes = {title.partition(":")[0]: values for title, (_, _, values) in panels(RECORDS, "fp32").items()}
    assert boxes["Figures 5, 9a, 14a"] == {"0.0312": [0.75]}
    assert boxes["Figures 9b, 14b"] == {"0.0417": [0.25]}
    assert boxes["Figures 6, 13"] == {"0.0312": [0.8], "0.0417": [2.0]}
    assert boxes["Figures 12, 17"]["bmm"] == [2.0]
    faster = panels([*RECORDS, record(ONE, "dense", "first", 0.5)], "fp32")
    assert faster["Figures 6, 13: cuda, where structure pays"][2] == {"0.0312": [0.8]}
