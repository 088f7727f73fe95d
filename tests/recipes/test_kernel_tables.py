"""The tables of kernels: what they say beside a time, that each runs on a CPU with --quick and goes on, and their pictures."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch

from flysurgery.bench import Measured, Stamp, Work
from flysurgery.bench.rows import columns_of, read_table, write_records
from tests.recipes.conftest import RECIPES, RunRecipe


def test_a_time_stands_beside_its_work_and_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(RECIPES))
    import recipe

    dense, failed = Measured("graph", "ok", 1e-3, 0.01, 2.0, 0.1, 1.0, 100, 30, 0.3, 0.15), Measured("graph", "needs CUDA")
    times, ratio, none, judged = recipe.cells(Measured("graph", "ok", 1e-3, 0.01, 0.5, 0.1, 0.25, 100, 5, 0.1, 0.2), dense, failed)
    assert times == recipe.Times("graph", 1e-3, 500.0, 100.0) and ratio == 0.25 and none is None
    assert judged == recipe.Judged(100, 5, 100.0, 0.2, 0.01, "ok")
    times, ratio, judged = recipe.cells(failed, dense)
    assert times == recipe.Times("graph", None, None, None) and ratio is None and judged.status == "needs CUDA"
    assert recipe.cells(Measured("eager", "ok", 1e-3, 0.01, 0.5, 0.1, 0.25), dense)[0].launch == "eager", "its own, not its base's"


def test_products_must_read_their_weights_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(RECIPES))
    import recipe

    weights = (torch.zeros(4, 3, dtype=torch.float16), torch.zeros(2, 4, dtype=torch.float16))
    assert recipe.work_of(1000, weights, rows=10) == Work(1000 + 2 * 20, 2 * 10 * 20)


TABLES = {
    "fused_linear_table": ("fused_linear", "mode"),
    "fused_ffn_table": ("fused_ffn", "dtype"),
    "norm_linear_table": ("norm_linear", "mode"),
    "attention_table": ("attention", "mode"),
    "gated_ffn_table": ("gated_ffn", "mode"),
    "few_rows_table": ("few_rows", "mode"),
    "factor_grad_table": ("factor_grad", "mode"),
    "fused_ablation": ("fused_ablation", "mode"),
    "ffn_without_wgmma": ("ffn_without_wgmma", "width"),
    "wide_table": ("wide", "part"),
    "optimized_vit": ("optimized_vit", "mode"),
}
"""Each recipe with the name of its rows, and the column that has a picture for each value."""


@pytest.mark.parametrize("name", TABLES)
def test_a_table_draws_the_pictures_that_lie_beside_its_rows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str) -> None:
    monkeypatch.syspath_prepend(str(RECIPES))
    stem, column = TABLES[name]
    table, (columns, rows) = importlib.import_module(name), read_table(RECIPES / "results" / f"{stem}_h200.csv")
    known = [*columns_of(table.Row), *columns_of(Stamp)]
    assert "launch" in known and columns in (known, [each for each in known if each != "launch"]), "rows of now, or of before that column"
    few = [row for value in {row[column] for row in rows} for row in [each for each in rows if each[column] == value][:6]]
    table.draw(few, tmp_path / f"{stem}_h200.png")
    drawn = {path.name for path in tmp_path.iterdir()}
    assert drawn == {path.name for path in (RECIPES / "results").glob(f"{stem}_h200.*png")}


QUICK: dict[str, tuple[tuple[str, ...], set[str]]] = {
    "fused_linear_table": ((), {"dense", "layer", "bmm", "einsum", "copy"}),
    "fused_ffn_table": ((), {"dense", "composed"}),
    "norm_linear_table": ((), {"dense", "copy"}),
    "attention_table": ((), {"pytorch", "flash"}),
    "gated_ffn_table": ((), {"dense", "converted"}),
    "few_rows_table": ((), {"dense"}),
    "factor_grad_table": ((), {"einsum"}),
    "fused_ablation": ((), {"einsum"}),
    "ffn_without_wgmma": ((), {"dense"}),
    "wide_table": ((), {"dense"}),
    "optimized_vit": (("--model", "test_vit"), {"dense", "dense optimized", "converted", "optimized"}),
}
"""Each recipe with arguments for a test, and the candidates that a CPU times; twins of baselines come with them."""


@pytest.mark.parametrize("name", QUICK)
@pytest.mark.filterwarnings("error::UserWarning:matplotlib")
def test_quick_runs_on_a_cpu_and_goes_on(
    run_recipe: RunRecipe, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    arguments, timed = QUICK[name]
    monkeypatch.setattr("flysurgery.bench.ceilings.PRODUCT_SIZE", {"cpu": 256})
    rows = run_recipe(f"{name}.py", *arguments, "--seconds", "0.01", "--plot", str(tmp_path / "picture.png"))
    key, time = ("change" if name == "fused_ablation" else "candidate"), next(each for each in rows[0] if each.startswith("median_"))
    assert {row[key].removesuffix(" again") for row in rows if row[time]} == timed
    for row in rows:
        assert row["device"] and row["launch"] == "eager"
        assert bool(row[time]) == (row["status"] == "ok" or row["status"].startswith("noisy"))
        assert row[time] or row["status"] in ("needs CUDA", "left out on a CPU") or "cudnn" in row[key]
        assert not row[time] or (float(row["error"]) < 1e-5 and row["noise"] and float(row["flops"]) >= 0)
    said = capsys.readouterr().out
    assert all(row[key] in said and row["status"][:10] in said for row in rows)
    assert list(tmp_path.glob("picture.*.png"))
    monkeypatch.setattr("recipe.measure", None)
    assert run_recipe(f"{name}.py", *arguments, "--plot", str(tmp_path / "picture.png")) == rows, "nothing is measured again"


def test_an_interrupted_table_goes_on_where_it_stopped(run_recipe: RunRecipe, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(RECIPES))
    import recipe

    right, copies = recipe.Table.copy, []

    def interrupted(table: recipe.Table, mode: str, bytes_moved: int) -> Measured:
        copies.append(bytes_moved)
        if len(copies) == 2:
            raise KeyboardInterrupt
        return right(table, mode, bytes_moved)

    monkeypatch.setattr(recipe.Table, "copy", interrupted)
    with pytest.raises(SystemExit, match="130"):
        run_recipe("norm_linear_table.py")
    kept = read_table(tmp_path / "rows.csv")[1]
    assert {row["architecture"] for row in kept} == {"gonon"}
    rows = run_recipe("norm_linear_table.py")
    assert rows[: len(kept)] == kept and len(copies) == 3
    assert [row["architecture"] for row in rows] == ["gonon"] * len(kept) + ["monarch"] * len(kept)


def test_rows_that_do_not_say_how_they_were_launched_are_not_added_to(run_recipe: RunRecipe, tmp_path: Path) -> None:
    run_recipe("factor_grad_table.py")
    columns, rows = read_table(out := tmp_path / "rows.csv")
    older = [{name: row[name] for name in columns if name != "launch"} for row in rows]
    write_records(out, older)
    with pytest.raises(SystemExit, match="a table of other measurements, or of another version, with the columns a, b, c, d, mode"):
        run_recipe("factor_grad_table.py")
    assert read_table(out)[1] == older


def test_a_table_of_another_commit_is_measured_anew_and_a_fresh_one_too(run_recipe: RunRecipe, tmp_path: Path) -> None:
    rows = run_recipe("factor_grad_table.py")
    out = tmp_path / "rows.csv"
    out.write_text(out.read_text().replace(rows[0]["torch"], "1.0"))
    assert [row["torch"] for row in run_recipe("factor_grad_table.py")] == [row["torch"] for row in rows]
    again = run_recipe("factor_grad_table.py", "--fresh")
    assert len(again) == len(rows)


@pytest.mark.skipif(torch.cuda.is_available(), reason="it is about machines without CUDA")
@pytest.mark.parametrize("name", [*QUICK, "vit_s16_on_gpu"])
def test_without_quick_a_cpu_is_told_of_it(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.syspath_prepend(str(RECIPES))
    monkeypatch.setattr("sys.argv", [name])
    import recipe

    with pytest.raises(SystemExit, match="needs a CUDA device; --quick runs on a CPU too"):
        recipe.main(importlib.import_module(name).main)
