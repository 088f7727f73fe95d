"""What the tables of kernels say beside a time: the work, its bound, and whether twins agree."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch

from flysurgery.bench import Ceilings, Timing, Work
from flysurgery.bench.rows import read_table
from tests.recipes.conftest import RECIPES


@pytest.fixture
def judged(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(RECIPES))
    import recipe

    monkeypatch.setattr(recipe, "ceilings", lambda mode: Ceilings(bytes_per_ms=1000.0, flops_per_ms=100.0))

    def of(again_ms: float):
        times = {"pytorch": 2.0, "pytorch again": again_ms, "ours": 0.5}
        works = {"pytorch": Work(100, 30), "pytorch again": Work(100, 30), "ours": Work(100, 5)}
        return recipe.judge("fp16", {name: Timing(ms, ms, ms) for name, ms in times.items()}, works, "pytorch")

    return of


def test_a_time_stands_beside_its_work_and_bound(judged) -> None:
    found = judged(2.02)
    assert (found["pytorch"].bound_us, found["pytorch"].share_of_bound) == (300.0, 0.15)  # 30 operations at 100 a millisecond
    assert (found["ours"].bound_us, found["ours"].share_of_bound) == (100.0, 0.2)  # 100 bytes at 1000
    assert (found["ours"].bytes_moved, found["ours"].flops) == (100, 5)
    assert {row.status for row in found.values()} == {"ok"}
    assert found["ours"].noise == pytest.approx(0.01)


def test_twins_that_differ_make_the_table_noisy(judged) -> None:
    assert {row.status for row in judged(2.2).values()} == {"noisy: pytorch timed twice differs by 10%"}


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
    rows = read_table(RECIPES / "results" / f"{stem}_h200.csv")[1]
    few = [row for value in {row[column] for row in rows} for row in [each for each in rows if each[column] == value][:6]]
    importlib.import_module(name).draw(few, tmp_path / f"{stem}_h200.png")
    drawn = {path.name for path in tmp_path.iterdir()}
    assert drawn == {path.name for path in (RECIPES / "results").glob(f"{stem}_h200.*png")}


def test_rows_are_drawn_as_they_were_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, judged) -> None:
    monkeypatch.syspath_prepend(str(RECIPES))
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "a device")
    import attention_table
    import recipe

    rows = [attention_table.Row("fp16", 8, 197, 6, name, 1e-4, 20.0, 0.1, 0.5, each) for name, each in judged(2.02).items()]
    records = recipe.records_of(rows)
    assert {record["device"] for record in records} == {"a device"} and records[0]["bound_us"] == 300.0
    attention_table.draw(records, tmp_path / "attention.png")
    assert (tmp_path / "attention.fp16.png").stat().st_size > 5000
