"""The patterns of the paper, tables and pictures made of their times, and kernels that other processes compile."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from flysurgery.gpu import single_choice
from flysurgery.gpu.cubins import cubin_folder
from flysurgery.gpu.single_choice import candidates, remember
from flysurgery.patterns import Pattern

SMALL, LIMIT = Pattern(2, 16, 24, 3), 99 * 1024


@pytest.fixture
def paper() -> Any:
    import paper_patterns

    return paper_patterns


def test_the_patterns_follow_the_papers_rule(paper: Any) -> None:
    patterns = paper.time_patterns()
    assert len(patterns) == len(set(patterns)) == 627
    assert Pattern(1, 1024, 256, 2) in patterns and Pattern(2, 1024, 256, 4) not in patterns, "too near to another ratio"
    assert Pattern(2, 48, 48, 4) in patterns and Pattern(2, 48, 48, 8) not in patterns
    assert max(paper.ROWS * max(each.shape) for each in patterns) < 2**31
    assert {each.a for each in paper.energy_patterns()} == {1, 4, 16, 32, 64}
    first, other = paper.shuffled(patterns, 0), paper.shuffled(patterns, 1)
    assert first == paper.shuffled(patterns, 0) != other and set(first) == set(patterns)


def record(pattern: str, candidate: str, layout: str, ms: float | None) -> dict[str, Any]:
    times = {"median_ms": "", "share_of_bound": ""} if ms is None else {"median_ms": str(ms), "share_of_bound": str(1 / ms)}
    return dict(zip("abcd", pattern.split(","), strict=True)) | {"mode": "fp32", "candidate": candidate, "layout": layout} | times


ONE, TWO = "1,48,48,4", "2,64,64,4"
RECORDS = [
    *(record(ONE, name, "first", ms) for name, ms in (("cuda", 1.0), ("bmm", 4.0), ("einsum", 3.0), ("dense", 9.0), ("sparse", None))),
    *(record(ONE, name, "last", ms) for name, ms in (("bmm", 2.0), ("dense", 8.0), ("bmm product only", 1.5))),
    *(record(TWO, name, "first", ms) for name, ms in (("cuda", 5.0), ("bmm", 4.0), ("bmm product only", 1.0))),
]


def test_a_claim_counts_the_better_layout_and_only_patterns_with_both_sides(paper: Any) -> None:
    times = paper.Times(RECORDS, "fp32")
    wins = [paper.count_wins(times, claim) for claim in paper.CLAIMS]
    # Dense was left out of the second pattern; 3 over 2, batch-size-last; the last without the bmm that is faster with the batch last.
    assert wins == [(1, 1, 8.0), (1, 1, 1.5), (1, 2, 2.0), (1, 2, 3.0)]
    text = paper.CLAIMS[2].text
    assert ("fp32", "2, 7", text, "50.0%", "x2.00", "2", "88.10 %, x1.39") in paper.wins_table(RECORDS, ["fp32"])
    assert {row[5] for row in paper.wins_table(RECORDS, ["fp16"])} == {"0"}


def test_shares_have_quartiles_where_there_are_two_patterns(paper: Any) -> None:
    whole = [record(name, "bmm", "first", 4.0) for name in (ONE, TWO)]
    ready = [record(name, "bmm product only", "first", ms) for name, ms in ((ONE, 2.0), (TWO, 3.0))]
    assert paper.shares_table([*whole, *ready], ["fp32"]) == [
        ("fp32", "rewriting in bmm, batch-size-first, of its time", "31%", "38%", "44%", "2"),  # 1/4 and 1/2
        ("fp32", "rewriting in bmm, batch-size-last, of its time", "", "", "", "0"),
        ("fp32", "bound over time of cuda, batch-size-first", "", "", "", "0"),
        ("fp32", "bound over time of bmm, batch-size-first", "25%", "25%", "25%", "2"),
    ]


def test_pictures_group_by_the_share_of_moving_and_the_gain_leaves_out_what_dense_wins(paper: Any, tmp_path: Path) -> None:
    found = paper.panels(RECORDS, "fp32")
    boxes = {title.partition(":")[0]: values for title, (_, _, values) in found.items()}
    assert boxes["Figures 5, 9a, 14a"] == {"0.0312": [0.75]} and boxes["Figures 9b, 14b"] == {"0.0417": [0.25]}
    assert boxes["Figures 6, 13"] == {"0.0312": [0.8], "0.0417": [2.0]} and boxes["Figures 12, 17"]["bmm"] == [2.0]
    faster = paper.panels([*RECORDS, record(ONE, "dense", "first", 0.5)], "fp32")
    assert faster["Figures 6, 13: cuda, where structure pays"][2] == {"0.0312": [0.8]}
    paper.draw_boxes(found, tmp_path / "boxes.png", title="all")
    assert (tmp_path / "boxes.png").stat().st_size > 5000


def test_the_energy_of_cuda_is_held_against_the_least_of_the_others(paper: Any) -> None:
    def row(candidate: str, joules: str, what: str = "p") -> dict[str, Any]:
        return {"what": what, "mode": "fp32", "rewriting": "" if what == "model" else "0.123", "candidate": candidate, "joules": joules}

    rows = [row("cuda", "1"), row("bmm", "4"), row("einsum", "2"), row("bsr", ""), row("dense", "9", "model")]
    assert paper.energy_boxes(rows) == {"0.12": [0.5]}


def test_a_case_is_prepared_once_for_all_processes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from factor_cases import compiled_ahead, prepared

    cases = [(SMALL, "fp16"), (Pattern(1, 8, 8, 1), "fp32")]
    assert list(compiled_ahead(cases, 64, torch.device("cpu"))) == cases, "there is nothing to compile"
    monkeypatch.setenv("FLYSURGERY_CACHE", str(tmp_path))
    found = prepared((SMALL, "fp16"), rows=64, shared_limit=LIMIT, arch="sm_80")
    assert found and found == candidates(SMALL, "fp16", LIMIT)
    assert any(path.is_file() for path in cubin_folder().rglob("*"))
    monkeypatch.setattr(single_choice, "_found_elsewhere", {})
    candidates.cache_clear()
    remember(SMALL, "fp16", LIMIT, found[:1])
    assert candidates(SMALL, "fp16", LIMIT) == found[:1], "it is not searched for again"
    candidates.cache_clear()
