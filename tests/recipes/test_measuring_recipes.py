"""The other measuring recipes, on sizes that take seconds on a CPU."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torch

from flysurgery.bench import EnergyRow, FactorRow, RivalRow, Stamp, factor
from flysurgery.bench.rows import columns_of, read_table
from flysurgery.ops import Problem
from flysurgery.patterns import Architecture, Pattern
from tests.recipes.conftest import RECIPES, TINY_VIT, RunRecipe


def test_patterns_are_measured_in_both_layouts_and_a_second_run_adds(
    run_recipe: RunRecipe, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = ("--rows", "24", "--largest", "400", "--modes", "fp32")
    rows = run_recipe("factors.py patterns", *small, "--count", "1", "--plot", str(tmp_path / "boxes.png"))
    timed = {(row["candidate"], row["layout"]) for row in rows if row["median_ms"]}
    both = {(name, layout) for name in ("dense", "bmm", "einsum", "bsr", "sparse", "bmm product only") for layout in ("first", "last")}
    assert timed >= both
    assert all(float(row["error"]) < 1e-6 for row in rows if row["median_ms"])
    assert "99.67 %, x6.57" in capsys.readouterr().out
    assert (tmp_path / "boxes.fp32.png").stat().st_size > 5000
    more = run_recipe("factors.py patterns", *small, "--count", "2")
    assert more[: len(rows)] == rows and len(more) == 2 * len(rows)


def test_a_wrong_product_of_blocks_has_no_time(run_recipe: RunRecipe, monkeypatch: pytest.MonkeyPatch) -> None:
    right = factor.product_only
    monkeypatch.setattr("flysurgery.bench.factor.product_only", lambda weights, layout: right(1.1 * weights, layout))
    rows = run_recipe("factors.py patterns", "--rows", "24", "--largest", "400", "--modes", "fp32", "--count", "1")
    products = [row for row in rows if row["candidate"] == factor.PRODUCT_ONLY]
    assert {(row["status"], row["median_ms"]) for row in products} == {("wrong: relative error 0.1", "")}


def test_no_pattern_is_small_enough(run_recipe: RunRecipe, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="--largest 47 leaves no pattern: the smallest has 48 features"):
        run_recipe("factors.py patterns", "--largest", "47")
    assert list(tmp_path.iterdir()) == []


def test_without_dense_there_is_no_ratio_to_it(run_recipe: RunRecipe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flysurgery.bench.factor.MOST_DENSE_ENTRIES", 1)
    rows = run_recipe("factors.py patterns", "--rows", "24", "--largest", "400", "--modes", "fp32", "--count", "1")
    timed = {row["candidate"]: row for row in rows if row["median_ms"]}
    assert {row["ratio_to_dense"] for row in timed.values()} == {""}
    assert "dense" not in timed and timed["bmm"]["noise"] and timed["bmm again"]["status"] == timed["bmm"]["status"]


def test_halves_on_cuda_have_larger_dense_matrices() -> None:
    pattern, most = Pattern(1, 48, 48, 4), factor.most_dense_entries
    kinds = ((torch.float32, "cuda"), (torch.float16, "cpu"), (torch.float16, "cuda"), (torch.bfloat16, "cuda"))
    entries = [most(Problem(Architecture((pattern,)), 8, dtype, device)) for dtype, device in kinds]
    assert entries == [1 << 25, 1 << 25, 1 << 30, 1 << 30]


def test_where_pruning_crosses_dense(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(RECIPES))
    import factors

    assert factors.crossing([(0.5, 3.0), (0.1, 0.9), (0.01, 0.2)]) == "faster than dense at 0.1 of the weights"
    assert factors.crossing([(0.5, 3.0), (0.1, 1.0)]) == "slower than dense down to 0.1 of the weights"


@pytest.mark.filterwarnings("error:constrained_layout not applied")
def test_rivals_are_right_and_those_that_are_absent_say_why(
    run_recipe: RunRecipe, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = run_recipe("factors.py rivals", "--rows", "40", "--width", "48", "--modes", "fp32", "--plot", str(tmp_path / "bars.png"))
    square = {row["candidate"]: row for row in rows if row["layer"] == "square"}
    assert {"dense", "dense again", "butterfly", "low rank, two linears", "magnitude pruning, CSR"} <= {
        name for name, row in square.items() if row["median_ms"]
    }
    assert square["low rank, two linears"]["note"] == "rank 6"  # as many weights as (1,24,6,2),(2,6,24,1): 576
    assert "CUDA" in square["2:4 semi-structured"]["status"]
    assert all(float(row["error"]) < 1e-6 for row in square.values() if row["error"])
    assert all(row["status"] for row in rows)
    assert "magnitude pruning, CSR, square, fp32: " in capsys.readouterr().out
    for name in ("bars.png", "bars.csr.png"):
        assert (tmp_path / name).stat().st_size > 5000


def test_cpu_tables_hold_int8_beside_the_butterfly(run_recipe: RunRecipe, tmp_path: Path) -> None:
    one = ("--threads", "1", "--modes", "fp32", "--archs", "monarch", "--protocols", "today")
    rows = run_recipe("vits.py cpu", *TINY_VIT, "--batches", "2", *one, "--plot", str(tmp_path / "bars.png"))
    model = {row["candidate"]: row for row in rows if row["unit"] == "model"}
    assert float(model["layer"]["error"]) < 1e-5 < float(model["int8 dynamic"]["error"]) < 0.2
    assert model["int8 dynamic"]["median_ms"]
    assert (tmp_path / "bars.fp32.png").stat().st_size > 5000


def test_energy_without_a_counter_is_times_alone_and_only_with_quick(
    run_recipe: RunRecipe, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    arguments = ("--model", "test_vit", "--count", "1")
    rows = run_recipe("factors.py energy", *arguments, "--plot", str(tmp_path / "boxes.png"))
    model = {row["candidate"]: row for row in rows if row["what"] == "test_vit"}
    assert model.keys() == {"dense", "dense again", "layer", "bmm"}
    assert {row["candidate"] for row in rows if row["call_ms"] and "(" in row["what"]} == {"bmm", "bmm again", "einsum", "bsr"}
    assert all(row["joules"] == "" and row["status"] for row in rows)
    assert {row["status"] for row in model.values()} == {"no joules: they need an NVIDIA GPU's counter"}
    assert (tmp_path / "boxes.png").stat().st_size > 5000
    assert run_recipe("factors.py energy", *arguments) == rows
    monkeypatch.setattr("sys.argv", ["factors.py", "energy", "--device", "cpu", "--out", str(tmp_path / "none.csv")])
    with pytest.raises(SystemExit, match="--quick times calls without it"):
        runpy.run_path(str(RECIPES / "factors.py"), run_name="__main__")
    assert not (tmp_path / "none.csv").exists()


def test_a_converted_model_is_timed_there_and_back(run_recipe: RunRecipe, tmp_path: Path) -> None:
    rows = run_recipe("vits.py training", "--seconds", "0.01", "--plot", str(tmp_path / "bars.png"))
    inference, step, steps, graph = rows
    assert [row["what"] for row in rows] == [
        *("inference, 1 block", "training step, 1 block", "training step, 1 block, 10 on end", "training step, 1 block, CUDA graph")
    ]
    assert float(inference["error"]) < 1e-5 and float(inference["dense_ms"]) > 0 < float(inference["converted_ms"])
    assert all(float(row["converted_ms"]) > 0 < float(row["share_of_bound"]) for row in (step, steps))
    assert (graph["status"], graph["converted_ms"]) == ("needs CUDA", "")
    assert (tmp_path / "bars.gonon.png").stat().st_size > 5000
    assert run_recipe("vits.py training") == rows


def test_whole_models_are_right_and_bounded_before_they_count(run_recipe: RunRecipe, capsys: pytest.CaptureFixture[str]) -> None:
    rows = {row["candidate"]: row for row in run_recipe("vits.py optimized", "--model", "test_vit", "--archs", "monarch", "--batches", "2")}
    assert rows.keys() == {"dense", "dense again", "dense optimized", "converted", "optimized"}
    assert all(float(row["error"]) < 1e-5 and row["median_ms"] and row["share_of_bound"] for row in rows.values())
    assert rows["dense"]["flops"] == rows["dense optimized"]["flops"]
    assert int(rows["optimized"]["flops"]) < int(rows["dense"]["flops"])
    assert {row["joules"] for row in rows.values()} == {""}
    assert "fused" in capsys.readouterr().out


@pytest.mark.parametrize(("results", "row"), [("patterns", FactorRow), ("energy", EnergyRow), ("rivals", RivalRow)])
def test_the_committed_rows_have_the_columns_of_now(results: str, row: type) -> None:
    columns, rows = read_table(RECIPES / "results" / f"{results}_h200.csv")
    assert columns == [*columns_of(row), *columns_of(Stamp)] and rows
