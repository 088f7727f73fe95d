"""The tables of kernels: what they say beside a time, that each runs on a CPU with --quick and goes on, and their pictures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from flysurgery.bench.rows import read_table
from tests.recipes.conftest import RECIPES, RunRecipe

TIMED: dict[str, set[str]] = {
    "attention": {"pytorch", "flash"},
    "norm_linear": {"dense", "copy"},
    "fused_linear": {"dense", "layer", "bmm", "einsum", "copy"},
    "factor_gradients": {"einsum"},
    "fused_ffn": {"dense", "composed"},
    "few_rows": {"dense"},
    "gated_ffn": {"dense", "converted"},
    "wide": {"dense"},
    "fused_ablation": {"einsum"},
}
"""Each table with the candidates that a CPU times; twins of baselines come with them."""


@pytest.fixture
def cases() -> Any:
    import kernel_cases

    assert list(kernel_cases.TABLES) == list(TIMED)
    return kernel_cases


@pytest.mark.parametrize("name", TIMED)
def test_the_committed_rows_are_of_the_cases_that_are_measured_now(cases: Any, name: str) -> None:
    import kernel_tables

    comparison = cases.TABLES[name]
    rows = [row for row in read_table(RECIPES / "results" / "kernels_h200.csv")[1] if row["table"] == name]
    filled = {name for row in rows for name, text in row.items() if text}
    assert {*comparison.columns, comparison.series, *comparison.ratios} <= filled & {*kernel_tables.columns_of(comparison)}
    modes = tuple(dict.fromkeys(row[comparison.mode] for row in rows)) if comparison.mode else ("fp16",)
    found = kernel_tables.cases_of(comparison, modes, 128)
    keys = {tuple(str(value) for value in case.values()) for case in found}
    assert keys >= {tuple(row[column] for column in found[0]) for row in rows}


@pytest.mark.parametrize("name", TIMED)
def test_every_case_can_be_made(cases: Any, name: str) -> None:
    """On a CPU and few rows: each candidate that runs there gives what the truth says, and each has its work."""
    comparison, place = cases.TABLES[name], cases.Place(torch.device("cpu"), 1)
    small = {"rows": cases.TOKENS if name == "few_rows" else 16, "images": 2}
    known = {key for case in comparison.cases for key in case} | ({"rows"} if comparison.tokens else set())
    sizes = {key: value for key, value in small.items() if key in known}
    for columns in {tuple((dict(case) | sizes).items()): None for case in comparison.cases}:
        case = comparison.make(place, "fp32", **dict(columns))
        assert {*case.columns, *dict(columns), *filter(None, [comparison.mode])} == set(comparison.columns)
        assert case.baseline in case.runs
        for candidate, run in case.runs.items():
            assert case.work(candidate).bytes_moved > 0
            if not isinstance(run, str) and candidate not in ("cudnn", "copy"):
                truth = case.truths[candidate] if isinstance(case.truths, dict) else case.truths
                torch.testing.assert_close(run(case.input(candidate))[: len(truth)].double(), truth, rtol=1e-3, atol=1e-3)


def test_cases_are_compiled_ahead_in_processes_of_their_own(cases: Any, capfd: pytest.CaptureFixture[str]) -> None:
    known = "fp32", cases.TABLES["factor_gradients"].cases[0]
    cases.compile_ahead("factor_gradients", cases.Place(torch.device("cpu"), 1), [known, ("fp32", {"layer": "none"})])
    (failed,) = capfd.readouterr().out.splitlines()
    assert failed.startswith("not compiled ahead: factor_gradients, fp32, {'layer': 'none'}: ")


@pytest.mark.parametrize("name", TIMED)
def test_quick_runs_on_a_cpu_and_goes_on(
    run_recipe: RunRecipe, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    monkeypatch.setattr("flysurgery.bench.ceilings.PRODUCT_SIZE", {"cpu": 256})
    rows = run_recipe(f"kernel_tables.py {name}", "--seconds", "0.01")
    key = "change" if name == "fused_ablation" else "candidate"
    assert {row[key].removesuffix(" again") for row in rows if row["median_us"]} == TIMED[name]
    for row in rows:
        assert row["device"] and row["launch"] == "eager"
        assert bool(row["median_us"]) == (row["status"] == "ok" or row["status"].startswith("noisy"))
        assert row["median_us"] or row["status"] in ("needs CUDA", "left out on a CPU") or "cudnn" in row[key]
        assert not row["median_us"] or (float(row["error"]) < 1e-5 and row["noise"] and float(row["flops"]) >= 0)
    said = capsys.readouterr().out
    assert all(row[key] in said and row["status"][:10] in said for row in rows)
    monkeypatch.setattr("flysurgery.bench.measuring.measure", None)
    assert run_recipe(f"kernel_tables.py {name}") == rows, "nothing is measured again"


def test_one_of_the_cases_is_chosen_by_its_columns(run_recipe: RunRecipe) -> None:
    rows = run_recipe("kernel_tables.py norm_linear", "--only", "monarch", "--rows", "40", "--seconds", "0.01")
    assert {(row["architecture"], row["rows"]) for row in rows} == {("monarch", "40")}
    refused = {
        ("norm_linear", "--only", "lowrank"): "--only lowrank matches none of the cases: fp32, gonon, 197; fp32, monarch, 197",
        ("attention", "--rows", "8"): "attention has its own numbers of rows; leave --rows out",
    }
    for (name, *arguments), sentence in refused.items():
        with pytest.raises(SystemExit, match=sentence):
            run_recipe(f"kernel_tables.py {name}", *arguments)


def test_an_interrupted_table_goes_on_where_it_stopped(run_recipe: RunRecipe, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import kernel_tables

    right, calls = kernel_tables.rows_of_case, []

    def interrupted(*arguments: Any) -> Any:
        calls.append(arguments)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return right(*arguments)

    monkeypatch.setattr("flysurgery.bench.rows_of_case", interrupted)
    with pytest.raises(SystemExit, match="130"):
        run_recipe("kernel_tables.py norm_linear")
    kept = read_table(tmp_path / "rows.csv")[1]
    assert {row["architecture"] for row in kept} == {"gonon"}
    rows = run_recipe("kernel_tables.py norm_linear")
    assert rows[: len(kept)] == kept and len(calls) == 3
    assert [row["architecture"] for row in rows] == ["gonon"] * len(kept) + ["monarch"] * len(kept)
