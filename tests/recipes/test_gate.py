"""The gate: which rows hold, which fail and why, and two checkouts measured in turns on a CPU."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from flysurgery.bench import in_mode
from flysurgery.bench.measuring import relative_error
from flysurgery.bench.rows import read_table
from tests.recipes.conftest import RECIPES

RunGate = Callable[..., Any]

SOUND = {
    "side": "now",
    "case": "a model",
    "candidate": "optimized",
    "status": "ok",
    "launch": "graph",
    "ms": "2.0",
    "noise": "0.0",
    "reference": "dense",
    "reference_ms": "8.0",
    "ratio": "0.25",
    "error": "1e-3",
    "most_error": "1.5e-3",
    "tolerance": "0.03",
    "date": "2026-11-23",
    "device": "NVIDIA H200",
    "driver": "580",
    "threads": "4",
    "torch": "2.11",
    "flysurgery": "0.1.0",
    "commit": "abc",
    "clocks_mhz": "1980/3201",
}
"""A row that has nothing wrong with it, as a file holds it."""


@pytest.fixture
def gate() -> ModuleType:
    return importlib.import_module("gate")


@pytest.fixture
def cases() -> ModuleType:
    return importlib.import_module("gate_cases")


@pytest.fixture
def run_gate(run_program: Callable[..., None]) -> RunGate:
    return partial(run_program, "gate.py", "--quick")


@pytest.mark.parametrize(
    ("before", "now", "said"),
    [
        ({}, {"ms": "2.05"}, "ok"),
        ({}, {"ms": "2.07"}, "slower by 3.5%, where 3% and the noise are allowed"),
        ({}, {"ms": "1.90"}, "faster"),
        ({"noise": "0.02"}, {"ms": "2.09"}, "ok"),
        ({}, {"ms": "2.09", "noise": "0.02"}, "ok"),
        ({}, {"ms": "2.09", "reference_ms": "8.16"}, "ok"),
        ({}, {"ms": "2.09", "reference_ms": "7.84"}, "ok"),
        ({}, {"ms": "2.09", "reference_ms": "8.16", "reference": "einsum"}, "slower by 4.5%, where 3% and the noise are allowed"),
        ({"noise": "0.5"}, {"ms": "2.11"}, "ok"),
        ({"noise": "0.5"}, {"ms": "2.13"}, "slower by 6.5%, where 3% and the noise are allowed"),
        ({"noise": "0.05"}, {"ms": "1.90"}, "ok"),
        ({}, {"ms": "2.15", "tolerance": "0.1"}, "ok"),
        ({}, {"error": "1.6e-3"}, "wrong: its error is 1.6e-3, and may be 1.5e-3"),
        ({}, {"status": "failed: no such kernel", "ms": "", "error": ""}, "failed: no such kernel"),
        ({"status": "failed: no such kernel", "ms": ""}, {}, "new"),
        ({"commit": "def", "date": "2026-11-22"}, {}, "ok"),
    ],
)
def test_a_row_holds_or_says_what_is_wrong(gate: ModuleType, before: dict[str, str], now: dict[str, str], said: str) -> None:
    assert gate.verdict(SOUND | before, SOUND | now) == said


def test_rows_of_one_side_alone(gate: ModuleType) -> None:
    assert gate.verdict(None, SOUND) == "new"
    assert gate.verdict(SOUND, None) == "gone"
    assert gate.verdict(None, SOUND | {"error": "1"}) == "wrong: its error is 1, and may be 1.5e-3"


def test_turns_become_one_row(gate: ModuleType) -> None:
    turns = [SOUND | each for each in ({"ms": "2.2", "reference_ms": "8"}, {"ms": "2.0", "error": "2e-3"}, {"ms": "2.1"})]
    row = gate.settled(turns)
    assert {name: float(row[name]) for name in ("ms", "noise", "reference_ms", "ratio", "error")} == {
        "ms": 2.1,
        "noise": 0.1,
        "reference_ms": 8.0,
        "ratio": 0.2625,
        "error": 2e-3,
    }
    assert row.keys() == SOUND.keys() and tuple(SOUND) == gate.COLUMNS
    failed = SOUND | {"status": "failed: once", "ms": ""}
    assert gate.settled([SOUND, failed, SOUND]) == failed


def test_one_row_that_fails_fails_the_gate(gate: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    before = [SOUND | {"side": "before", "candidate": name} for name in ("optimized", "converted")]
    slower, same = SOUND | {"ms": "2.2"}, SOUND | {"candidate": "converted"}
    assert gate.compare([*before, SOUND, same])
    assert "2 rows, 2 hold\n" in capsys.readouterr().out
    assert not gate.compare([*before, slower, same])
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "2 rows, 1 hold, 1 fail"
    assert re.search(r"a model +optimized +2\.0 +2\.2 +1\.100 +0\.0% +dense +0\.25 .* slower by 10\.0%", lines[1])
    assert not gate.compare([*before, SOUND]), "a row that is gone"


def test_both_checkouts_take_turns_and_their_rows_are_kept(
    run_gate: RunGate, cases: ModuleType, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    measured = [case for case in cases.QUICK if case.part in ("FFN", cases.FACTOR)]
    try:
        run_gate("--base", RECIPES.parent, "--save", tmp_path / "rows.csv", "--only", "FFN|factor")
    except SystemExit as stopped:  # a row is slower, as on a CPU that other work shares
        assert stopped.code == 1
    _, rows = read_table(tmp_path / "rows.csv")
    for side in ("before", "now"):
        assert [row["case"] for row in rows if row["side"] == side] == [case.name for case in measured]
    for row in rows:
        assert row["status"] == "ok" and float(row["ms"]) > 0 < float(row["ratio"]) and float(row["noise"]) > 0
        assert row["device"] and row["commit"]
    said = capfd.readouterr()
    assert [line for line in said.err.splitlines() if line.startswith("measured")] == [f"measured {case.name}" for case in measured]
    assert "2 rows, " in said.out


def test_every_kind_of_case_is_right_and_timed(cases: ModuleType) -> None:
    for case in cases.QUICK:
        torch.manual_seed(0)
        with in_mode(case.mode) as dtype:
            rows = cases.turn(case, cases.made(case, torch.device("cpu"), dtype))
        assert [(row.case, row.candidate, row.status, row.launch) for row in rows] == [(case.name, own, "ok", "eager") for own in case.own]
        for row in rows:
            assert 0 < row.error <= row.most_error < 0.05 and row.ratio == row.ms / row.reference_ms and row.tolerance == 0.1
        assert {row.reference for row in rows} <= {"dense", "einsum"}


def test_a_wrong_result_and_a_failure_are_rows(cases: ModuleType) -> None:
    case = next(case for case in cases.QUICK if case.part == cases.FACTOR)
    runs = cases.made(case, torch.device("cpu"), torch.float32)
    right = runs.own["layer"]

    def broken(x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no such kernel")

    wrong = cases.Runs({"layer": lambda x: 1.1 * right(x), "other": broken}, runs.references, runs.x, runs.truths, runs.rows)
    first, second = cases.turn(case, wrong)
    assert (first.status, first.ms, second.status) == ("wrong: relative error 0.1", None, "failed: no such kernel")
    (alone,) = cases.turn(case, cases.Runs(runs.own, {"einsum": broken}, runs.x, runs.truths, runs.rows))
    assert alone.status == "not compared with PyTorch: failed: no such kernel"


def test_a_small_loss_of_precision_is_seen(gate: ModuleType, cases: ModuleType) -> None:
    case = next(case for case in cases.QUICK if case.part == cases.FACTOR)
    runs = cases.made(case, torch.device("cpu"), torch.float32)
    rounded = {"layer": lambda x: runs.own["layer"](x.bfloat16().float())}
    (row,) = cases.turn(case, cases.Runs(rounded, runs.references, runs.x, runs.truths, runs.rows))
    assert row.status == "ok" and row.error > row.most_error
    text = {name: str(value) for name, value in vars(row).items()}
    assert gate.verdict(None, text).startswith("wrong: its error is 0.00")


@pytest.mark.filterwarnings("ignore:In CPU autocast, but the target dtype is not supported")
def test_a_step_without_rounding_gives_the_exact_gradient_each_time(cases: ModuleType) -> None:
    case = next(case for case in cases.QUICK if case.part == cases.STEP)
    torch.manual_seed(0)
    runs = cases.made(case, torch.device("cpu"), torch.float32)
    for name, run in {**runs.own, **runs.references}.items():
        for _ in range(2):
            assert relative_error(run(runs.x), runs.truths[name]) < 1e-5


def test_what_may_be_wrong_by_how_much(cases: ModuleType) -> None:
    worst = {(case.part, case.mode): case.worst for case in cases.GPU}
    assert worst["model", "fp32"] == worst["model", "tf32"] == worst["training step", "bf16"] == 2.0
    assert worst["model", "fp16"] == worst["model", "bf16"] == worst["FFN", "fp16"] == worst["factor", "fp16"] == 1.06
    for table in (cases.GPU, cases.CPU, cases.QUICK):
        assert len({case.name for case in table}) == len(table)


def test_bad_input_is_one_sentence(run_gate: RunGate, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match=r"--base takes a checkout that has this recipe, and there is no .*gate\.py; name another folder"):
        run_gate("--base", tmp_path)
    with pytest.raises(SystemExit, match="--save takes a file"):
        run_gate("--save", tmp_path)
    with pytest.raises(SystemExit, match="2"):
        run_gate("--only", "[")
    assert "argument --only: expected a regular expression, got '['" in capsys.readouterr().err


def test_a_process_that_ends_is_one_sentence(run_gate: RunGate, tmp_path: Path) -> None:
    other = tmp_path / "other"
    (other / "recipes").mkdir(parents=True)
    (other / "recipes" / "gate.py").write_text("raise SystemExit(3)\n")
    with pytest.raises(SystemExit, match=r"the process that measures .*other ended with 3; see what it wrote above"):
        run_gate("--base", other)


def test_another_checkout_measures_by_its_own_recipe(run_gate: RunGate, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    row = SOUND | {"case": "a part that is gone", "a column of its own": "1"}
    script = f"import json\nprint(json.dumps([{row['case']!r}]), flush=True)\nwhile input(): print(json.dumps([{row!r}]), flush=True)\n"
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "gate.py").write_text(script)
    with pytest.raises(SystemExit, match="1"):
        run_gate("--base", tmp_path, "--only", "gone", "--save", tmp_path / "rows.csv")
    said = capfd.readouterr().out
    assert re.search(r"a part that is gone +optimized +2 .* gone\n", said) and "1 rows, 0 hold, 1 fail" in said
    with pytest.raises(SystemExit, match=r"--only nothing matches none of the cases: .*a part that is gone"):
        run_gate("--base", tmp_path, "--only", "nothing")
