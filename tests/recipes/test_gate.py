"""The gate: which rows hold, which fail and why, and two checkouts measured in turns on a CPU."""

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from flysurgery.bench import in_mode
from flysurgery.bench.rows import read_table
from tests.recipes.conftest import RECIPES

NUMBERS = {
    "ms": "2.0",
    "noise": "0.0",
    "reference_ms": "8.0",
    "ratio": "0.25",
    "error": "1e-3",
    "most_error": "1.5e-3",
    "tolerance": "0.03",
}

STAMPED = {"date": "2026-11-23", "device": "NVIDIA H200", "driver": "580", "threads": "4", "torch": "2.11", "flysurgery": "0.1.0"}

SOUND = {"side": "now", "case": "a model", "candidate": "optimized", "status": "ok", "launch": "graph", "reference": "dense"}
SOUND |= NUMBERS | STAMPED | {"commit": "abc", "clocks_mhz": "1980/3201"}
"""A row that has nothing wrong with it, as a file holds it."""

RunGate = Callable[..., Any]


@pytest.fixture
def run_gate(run_program: Callable[..., None]) -> RunGate:
    return partial(run_program, "gate.py", "--quick")


@pytest.mark.parametrize(
    ("before", "now", "said"),
    [
        ({}, {"ms": "2.05"}, "ok"),
        ({}, {"ms": "2.07"}, "slower by 3.5%, where 3% and the noise are allowed"),
        ({}, {"ms": "1.90"}, "faster"),
        ({}, {"ms": "2.09", "noise": "0.02"}, "ok"),
        ({}, {"ms": "2.09", "reference_ms": "7.84"}, "ok"),
        ({}, {"ms": "2.09", "reference_ms": "8.16", "reference": "einsum"}, "slower by 4.5%, where 3% and the noise are allowed"),
        ({"noise": "0.5"}, {"ms": "2.11"}, "ok"),
        ({"noise": "0.5"}, {"ms": "2.13"}, "slower by 6.5%, where 3% and the noise are allowed"),
        ({}, {"ms": "2.15", "tolerance": "0.1"}, "ok"),
        ({}, {"error": "1.6e-3"}, "wrong: its error is 1.6e-3, and may be 1.5e-3"),
        ({}, {"status": "failed: no such kernel", "ms": "", "error": ""}, "failed: no such kernel"),
        ({"status": "failed: no such kernel", "ms": ""}, {}, "new"),
        ({"commit": "def", "date": "2026-11-22"}, {}, "ok"),
    ],
)
def test_a_row_holds_or_says_what_is_wrong(before: dict[str, str], now: dict[str, str], said: str) -> None:
    import gate

    assert gate.verdict(SOUND | before, SOUND | now) == said


def test_turns_become_one_row() -> None:
    import gate

    row = gate.settled([SOUND | each for each in ({"ms": "2.2", "reference_ms": "8"}, {"ms": "2.0", "error": "2e-3"}, {"ms": "2.1"})])
    expected = {"ms": 2.1, "noise": 0.1, "reference_ms": 8.0, "ratio": 0.2625, "error": 2e-3}
    assert {name: float(row[name]) for name in expected} == expected and row.keys() == {*gate.COLUMNS}
    failed = SOUND | {"status": "failed: once", "ms": ""}
    assert gate.settled([SOUND, failed, SOUND]) == failed


def test_one_row_that_fails_fails_the_gate(capsys: pytest.CaptureFixture[str]) -> None:
    import gate

    before = [SOUND | {"side": "before", "candidate": name} for name in ("optimized", "converted")]
    slower, same = SOUND | {"ms": "2.2"}, SOUND | {"candidate": "converted"}
    assert gate.compare([*before, SOUND, same]) and "2 rows, 2 hold\n" in capsys.readouterr().out
    assert not gate.compare([*before, slower, same])
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "2 rows, 1 hold, 1 fail"
    assert re.search(r"a model +optimized +2\.0 +2\.2 +1\.100 +0\.0% +dense +0\.25 .* slower by 10\.0%", lines[1])
    assert not gate.compare([*before, SOUND]), "a row that is gone"
    assert gate.compare([SOUND]), "a new one"


def test_both_checkouts_take_turns_and_their_rows_are_kept(run_gate: RunGate, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    try:
        run_gate("--base", RECIPES.parent, "--save", tmp_path / "rows.csv", "--only", "factor")
    except SystemExit as stopped:  # a row is slower, as on a CPU that other work shares
        assert stopped.code == 1
    _, rows = read_table(tmp_path / "rows.csv")
    name = "factor 2,8,4,3, fp32, 40"
    assert [(row["side"], row["case"], row["status"]) for row in rows] == [(side, name, "ok") for side in ("before", "now")]
    assert all(float(row["ms"]) > 0 < float(row["ratio"]) and float(row["noise"]) > 0 and row["commit"] for row in rows)
    said = capfd.readouterr()
    assert f"measured {name}\n" in said.err and "1 rows, " in said.out


def test_every_kind_of_case_is_right_and_timed() -> None:
    import gate as cases

    for entry in cases.QUICK:
        torch.manual_seed(0)
        with in_mode(entry.mode) as dtype:
            rows = cases.turn(entry, entry.case(torch.device("cpu"), dtype))
        said = [(row["case"], row["candidate"], row["status"], row["launch"]) for row in rows]
        assert said == [(entry.name, own, "ok", "eager") for own in entry.own]
        for row in rows:
            assert (
                0 < row["error"] <= row["most_error"] < 0.05 and row["ratio"] == row["ms"] / row["reference_ms"] and row["tolerance"] == 0.1
            )
    for table in (cases.GPU, cases.CPU, cases.QUICK):
        assert len({entry.name for entry in table}) == len(table)


def test_a_process_that_fails_is_told(run_gate: RunGate, tmp_path: Path) -> None:
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "gate.py").write_text("raise SystemExit(3)\n")
    with pytest.raises(SystemExit, match=r"the process that measures .* ended with 3; see what it wrote above"):
        run_gate("--base", tmp_path)
