"""Tables 3 and 6 on a ViT of one small block."""

from __future__ import annotations

from pathlib import Path

import pytest

from flysurgery.bench import Stamp
from flysurgery.bench.rows import columns_of, read_table
from tests.recipes.conftest import RECIPES, TINY_VIT, RunRecipe

TIMED = {"dense", "dense again", "layer", "bmm", "einsum"}


def test_table_3_has_every_part_right_in_both_protocols(run_recipe: RunRecipe, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = (*TINY_VIT, "--batches", "2", "--modes", "fp32", "--plot", str(tmp_path / "bars.png"))
    rows = run_recipe("vits.py table3", *arguments)
    for protocol, parts in (("paper", 5), ("today", 4)):
        own = [row for row in rows if row["protocol"] == protocol]
        assert len({row["unit"] for row in own}) == parts
        for unit in {row["unit"] for row in own}:
            timed = {row["candidate"]: row for row in own if row["unit"] == unit and row["median_ms"]}
            assert timed.keys() >= TIMED
            assert all(float(row["error"]) < 1e-5 for row in timed.values())
    by_name = {(row["protocol"], row["unit"], row["candidate"]): row for row in rows}
    assert by_name["paper", "FFN", "layer"]["paper_ratio"] == "0.77"
    assert by_name["paper", "model", "bmm"]["paper_ratio"] == "0.89"
    assert "CUDA" in by_name["paper", "block", "two launches"]["status"]
    # 16 rows of 48 features through (1,24,6,2),(2,6,24,1), float32: in, out and the weights of both factors
    linear = by_name["paper", "linear N x N", "layer"]
    assert int(linear["bytes_moved"]) == 4 * (2 * 2 * 16 * 48 + 2 * 288)
    assert int(linear["flops"]) == 2 * 16 * 2 * 2 * 288
    assert (tmp_path / "bars.fp32.png").stat().st_size > 5000
    assert "time" not in capsys.readouterr().err


def test_table_6_has_the_linears_with_and_without_bias(run_recipe: RunRecipe) -> None:
    rows = run_recipe("vits.py table6", *TINY_VIT, "--batches", "1", "--modes", "fp32", "--protocols", "paper")
    units = {row["unit"] for row in rows}
    assert units == {f"linear {size}{bias}" for size in ("N x N", "4N x N", "N x 4N") for bias in ("", " + bias")}
    assert {row["paper_ratio"] for row in rows if row["unit"] == "linear N x 4N + bias"} == {"", "0.94", "0.61"}
    again = run_recipe("vits.py table6", *TINY_VIT, "--batches", "1", "--modes", "fp32", "--protocols", "paper")
    assert again == rows  # nothing was measured twice


def test_a_model_that_is_not_the_papers_has_no_ratio_of_theirs(run_recipe: RunRecipe) -> None:
    one = ("--batches", "1", "--modes", "fp32", "--protocols", "paper", "--parts", "linear N x N", "--candidates", "dense,bmm")
    rows = run_recipe("vits.py table6", *TINY_VIT, "--model", "vit_tiny_patch16_224", *one)
    assert {row["paper_ratio"] for row in rows} == {""}


def test_a_run_that_goes_on_tells_models_of_one_name_apart(run_recipe: RunRecipe) -> None:
    one = ("--batches", "1", "--modes", "fp32", "--protocols", "paper", "--parts", "linear N x N", "--candidates", "dense,bmm")
    first = run_recipe("vits.py table6", *TINY_VIT, *one)
    both = run_recipe("vits.py table6", *TINY_VIT, "--model-args", "embed_dim=96", *one)
    assert both[: len(first)] == first and len(both) == 2 * len(first)
    assert first[0]["model"].startswith("vit_small_patch16_224, embed_dim=48, depth=1") and "embed_dim=96" in both[-1]["model"]


@pytest.mark.parametrize(
    ("option", "name", "sentence"),
    [
        ("--modes", "tf32", "there is no mode 'tf32' on cpu"),
        ("--candidates", "dense,bsm", "there is no candidate 'bsm'; choose from dense, layer"),
        ("--parts", "blok", "no part of vit_small_patch16_224 is called blok; the parts are FFN, attention, block"),
        ("--launches", "grph", "there is no launch 'grph'; choose from graph, eager"),
    ],
)
def test_an_unknown_name_is_one_sentence(run_recipe: RunRecipe, option: str, name: str, sentence: str) -> None:
    with pytest.raises(SystemExit, match=sentence):
        run_recipe("vits.py table6", option, name)


def test_a_training_step_is_timed_and_bounded_beside_dense(run_recipe: RunRecipe) -> None:
    one = ("--batches", "2", "--modes", "fp32", "--protocols", "paper", "--parts", "linear N x N", "--candidates", "dense")
    rows = run_recipe("vits.py table3", *TINY_VIT, *one, "--training")
    step = {row["candidate"]: row for row in rows if row["unit"] == "training step"}
    assert step.keys() == {"dense", "dense again", "layer"}
    assert all(row["median_ms"] and row["share_of_bound"] for row in step.values())
    assert 0 < int(step["layer"]["flops"]) < int(step["dense"]["flops"])


@pytest.mark.filterwarnings("error:constrained_layout not applied")
def test_table_5_has_the_whole_model_and_its_feed_forward_linears(run_recipe: RunRecipe, tmp_path: Path) -> None:
    rows = run_recipe("vits.py table5", *TINY_VIT[2:], "--batch", "2", "--plot", str(tmp_path / "bars.png"))
    by_name = {row["candidate"]: row for row in rows}
    assert by_name.keys() == {"dense", "dense again", "linears of FFNs"}
    linears, whole = by_name["linears of FFNs"], by_name["dense"]
    assert float(linears["ratio_to_dense"]) == pytest.approx(float(linears["median_ms"]) / float(whole["median_ms"]), rel=1e-3)
    assert all(float(row["error"]) < 1e-5 and row["share_of_bound"] and row["noise"] for row in rows)
    # two images of 17 tokens, 48 wide and 192, float32: in, out, weights and biases
    assert int(linears["flops"]) == 2 * 2 * 17 * 2 * 48 * 192 < int(whole["flops"])
    assert int(linears["bytes_moved"]) == 4 * (2 * 2 * 17 * 48 + 2 * 48 * 192 + 192 + 48)
    assert {row["paper_ratio"] for row in rows} == {""}, "the paper has no such model"
    assert (tmp_path / "bars.png").stat().st_size > 5000
    assert run_recipe("vits.py table5", *TINY_VIT[2:], "--batch", "2") == rows  # nothing was measured twice


@pytest.mark.parametrize(
    ("results", "row"),
    [
        ("vit_s16_table3_h200", "LayerRow"),
        ("vit_s16_table6_h200", "LayerRow"),
        ("vit_sizes_h200", "LayerRow"),
        ("cpu_tables", "LayerRow"),
        ("vit_table5_h200", "ShareRow"),
        ("optimized_vit_h200", "OptimizedRow"),
        ("optimized_vit_headline_h200", "OptimizedRow"),
        ("vit_s16_gonon_h200", "TrainingRow"),
        ("vit_s16_monarch_h200", "TrainingRow"),
    ],
)
def test_the_committed_rows_have_the_columns_of_now(monkeypatch: pytest.MonkeyPatch, results: str, row: str) -> None:
    monkeypatch.syspath_prepend(str(RECIPES))
    import vit_models
    import vits

    columns, rows = read_table(RECIPES / "results" / f"{results}.csv")
    assert columns == [*columns_of(getattr(vits, row, None) or getattr(vit_models, row)), *columns_of(Stamp)] and rows


def test_every_table_is_named_in_the_help() -> None:
    text = (RECIPES / "vits.py").read_text().partition('"""\n\nfrom __future__')[0]
    for table in ("table3", "table6", "cpu", "table5", "optimized", "training"):
        assert f"\n    {table} " in text
