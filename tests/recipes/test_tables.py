"""The tables of models and of factors, on sizes that take seconds on a CPU, and their committed rows."""

from __future__ import annotations

from pathlib import Path

import pytest

from flysurgery.bench.rows import STAMP, read_table
from tests.recipes.conftest import RECIPES, TINY_VIT, RunRecipe

ONE_PATTERN = ("--rows", "24", "--largest", "400", "--modes", "fp32", "--count", "1")
ONE_LINEAR = ("--batches", "1", "--modes", "fp32", "--protocols", "paper", "--parts", "linear N x N", "--candidates", "dense,bmm")


def test_table_3_has_every_part_right_in_both_protocols(run_recipe: RunRecipe) -> None:
    rows = run_recipe("vits.py table3", *TINY_VIT, "--batches", "2", "--modes", "fp32")
    for protocol, parts in (("paper", 5), ("today", 4)):
        own = [row for row in rows if row["protocol"] == protocol]
        assert len({row["unit"] for row in own}) == parts
        for unit in {row["unit"] for row in own}:
            timed = {row["candidate"]: row for row in own if row["unit"] == unit and row["median_ms"]}
            assert timed.keys() >= {"dense", "dense again", "layer", "bmm", "einsum"}
            assert all(float(row["error"]) < 1e-5 for row in timed.values())
    by_name = {(row["protocol"], row["unit"], row["candidate"]): row for row in rows}
    assert by_name["paper", "FFN", "layer"]["paper_ratio"] == "0.77"
    assert by_name["paper", "model", "bmm"]["paper_ratio"] == "0.89"
    assert "CUDA" in by_name["paper", "block", "two launches"]["status"]
    # 16 rows of 48 features through (1,24,6,2),(2,6,24,1), float32: in, out and the weights of both factors
    linear = by_name["paper", "linear N x N", "layer"]
    assert int(linear["bytes_moved"]) == 4 * (2 * 2 * 16 * 48 + 2 * 288)
    assert int(linear["flops"]) == 2 * 16 * 2 * 2 * 288


def test_table_6_has_the_linears_with_and_without_bias(run_recipe: RunRecipe) -> None:
    rows = run_recipe("vits.py table6", *TINY_VIT, "--batches", "1", "--modes", "fp32", "--protocols", "paper")
    assert {row["unit"] for row in rows} == {f"linear {size}{bias}" for size in ("N x N", "4N x N", "N x 4N") for bias in ("", " + bias")}
    assert {row["paper_ratio"] for row in rows if row["unit"] == "linear N x 4N + bias"} == {"", "0.94", "0.61"}


def test_a_run_that_goes_on_tells_models_of_one_name_apart(run_recipe: RunRecipe) -> None:
    first = run_recipe("vits.py table6", *TINY_VIT, *ONE_LINEAR)
    both = run_recipe("vits.py table6", *TINY_VIT, "--model-args", "embed_dim=96", *ONE_LINEAR)
    assert both[: len(first)] == first and len(both) == 2 * len(first)
    assert first[0]["model"].startswith("vit_small_patch16_224, embed_dim=48, depth=1") and "embed_dim=96" in both[-1]["model"]
    other = run_recipe("vits.py table6", *TINY_VIT, "--model", "vit_tiny_patch16_224", *ONE_LINEAR)[len(both) :]
    assert {row["paper_ratio"] for row in other} == {""}, "the paper has no such model"


@pytest.mark.parametrize(
    ("option", "name", "sentence"),
    [
        ("--modes", "tf32", "there is no mode 'tf32' on cpu"),
        ("--candidates", "dense,bsm", "there is no 'bsm'; choose from dense, layer"),
        ("--parts", "blok", "no part of vit_small_patch16_224 is called blok; the parts are FFN, attention, block"),
        ("--launches", "grph", "there is no 'grph'; choose from graph, eager"),
        ("--launches", "graph", "there is nothing to measure by these options on this device"),
    ],
)
def test_an_unknown_name_is_one_sentence(
    run_recipe: RunRecipe, capsys: pytest.CaptureFixture[str], option: str, name: str, sentence: str
) -> None:
    with pytest.raises(SystemExit) as stopped:
        run_recipe("vits.py table6", option, name)
    assert sentence in f"{stopped.value}{capsys.readouterr().err}"


def test_table_5_has_the_whole_model_and_its_feed_forward_linears(run_recipe: RunRecipe) -> None:
    rows = run_recipe("vits.py table5", *TINY_VIT[2:], "--batch", "2")
    by_name = {row["candidate"]: row for row in rows}
    assert by_name.keys() == {"dense", "dense again", "linears of FFNs"}
    linears, whole = by_name["linears of FFNs"], by_name["dense"]
    assert float(linears["ratio_to_dense"]) == pytest.approx(float(linears["median_ms"]) / float(whole["median_ms"]), rel=1e-3)
    # two images of 17 tokens, 48 wide and 192, float32: in, out, weights and biases
    assert int(linears["flops"]) == 2 * 2 * 17 * 2 * 48 * 192 < int(whole["flops"])
    assert int(linears["bytes_moved"]) == 4 * (2 * 2 * 17 * 48 + 2 * 48 * 192 + 192 + 48)
    assert run_recipe("vits.py table5", *TINY_VIT[2:], "--batch", "2") == rows, "nothing is measured again"


def test_cpu_tables_hold_int8_beside_the_butterfly(run_recipe: RunRecipe) -> None:
    one = ("--threads", "1", "--modes", "fp32", "--archs", "monarch", "--protocols", "today", "--batches", "2", "--parts", "model")
    rows = {row["candidate"]: row for row in run_recipe("vits.py cpu", *TINY_VIT, *one)}
    assert float(rows["layer"]["error"]) < 1e-5 < float(rows["int8 dynamic"]["error"]) < 0.2 and rows["int8 dynamic"]["median_ms"]


def test_whole_models_are_right_and_bounded_before_they_count(run_recipe: RunRecipe, capsys: pytest.CaptureFixture[str]) -> None:
    rows = {row["candidate"]: row for row in run_recipe("vits.py optimized", "--model", "test_vit", "--archs", "monarch", "--batches", "2")}
    assert rows.keys() == {"dense", "dense again", "dense optimized", "converted", "optimized"}
    assert all(float(row["error"]) < 1e-5 and row["median_ms"] and row["share_of_bound"] for row in rows.values())
    assert int(rows["optimized"]["flops"]) < int(rows["dense"]["flops"]) == int(rows["dense optimized"]["flops"])
    assert {row["joules"] for row in rows.values()} == {""} and "fused" in capsys.readouterr().out


def test_training_is_checked_and_timed_in_three_ways(run_recipe: RunRecipe) -> None:
    rows = run_recipe("vits.py training", "--model", "test_vit", "--arch", "monarch", "--seconds", "0.01")
    one, ten, graph = (
        {row["candidate"]: row for row in rows if row["what"] == what}
        for what in ("training step", "10 training steps", "training step, CUDA graph")
    )
    for found in (one, ten):
        assert found.keys() == {"dense", "dense again", "converted"}
        assert all(float(row["median_ms"]) > 0 < float(row["error"]) < 0.05 for row in found.values())
    assert int(ten["dense"]["flops"]) == 10 * int(one["dense"]["flops"]) > 10 * int(one["converted"]["flops"])
    assert {row["status"] for row in graph.values()} == {"needs CUDA"}


def test_patterns_are_measured_in_both_layouts_and_a_second_run_adds(
    run_recipe: RunRecipe, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = run_recipe("factors.py patterns", *ONE_PATTERN, "--plot", tmp_path / "boxes.png")
    timed = {(row["candidate"], row["layout"]) for row in rows if row["median_ms"]}
    assert timed >= {
        (name, layout) for name in ("dense", "bmm", "einsum", "bsr", "sparse", "bmm product only") for layout in ("first", "last")
    }
    assert all(float(row["error"]) < 1e-6 for row in rows if row["median_ms"])
    assert "99.67 %, x6.57" in capsys.readouterr().out
    assert (tmp_path / "boxes.fp32.png").stat().st_size > 5000
    more = run_recipe("factors.py patterns", *ONE_PATTERN[:-1], "2")
    assert more[: len(rows)] == rows and len(more) == 2 * len(rows)
    run_recipe("factors.py patterns", *ONE_PATTERN[:-1], "3", "--minutes", "1e-9")
    assert "1 of 1 measurements are left for the next run" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="--largest 47 leaves no pattern: the smallest has 48 features"):
        run_recipe("factors.py patterns", "--largest", "47")


def test_a_wrong_product_has_no_time_and_without_dense_there_is_no_ratio(run_recipe: RunRecipe, monkeypatch: pytest.MonkeyPatch) -> None:
    import factor_cases as factor

    right = factor.product_only
    monkeypatch.setattr(factor, "product_only", lambda weights, layout: right(1.1 * weights, layout))
    monkeypatch.setattr(factor, "MOST_DENSE_ENTRIES", 1)
    rows = run_recipe("factors.py patterns", *ONE_PATTERN)
    wrong = [row for row in rows if row["candidate"] == factor.PRODUCT_ONLY]
    assert {(row["status"], row["median_ms"]) for row in wrong} == {("wrong: relative error 0.1", "")}
    timed = {row["candidate"]: row for row in rows if row["median_ms"]}
    assert "dense" not in timed and {row["ratio_to_dense"] for row in timed.values()} == {""}
    assert timed["bmm"]["noise"] and timed["bmm again"]["status"] == timed["bmm"]["status"]


def test_rivals_are_right_and_those_that_are_absent_say_why(run_recipe: RunRecipe, capsys: pytest.CaptureFixture[str]) -> None:
    import factors

    rows = run_recipe("factors.py rivals", "--rows", "40", "--width", "48", "--modes", "fp32")
    square = {row["candidate"]: row for row in rows if row["layer"] == "square"}
    timed = {name for name, row in square.items() if row["median_ms"]}
    assert timed >= {"dense", "dense again", "butterfly", "low rank, two linears", "magnitude pruning, CSR"}
    assert square["low rank, two linears"]["note"] == "rank 6"  # as many weights as (1,24,6,2),(2,6,24,1): 576
    assert "CUDA" in square["2:4 semi-structured"]["status"] and all(row["status"] for row in rows)
    assert all(float(row["error"]) < 1e-6 for row in square.values() if row["error"])
    assert "magnitude pruning, CSR, square, fp32: " in capsys.readouterr().out
    assert factors.crossing([(0.5, 3.0), (0.1, 0.9), (0.01, 0.2)]) == "faster than dense at 0.1 of the weights"
    assert factors.crossing([(0.5, 3.0), (0.1, 1.0)]) == "slower than dense down to 0.1 of the weights"


def test_energy_without_a_counter_is_times_alone(run_recipe: RunRecipe, tmp_path: Path) -> None:
    rows = run_recipe("factors.py energy", "--count", "1", "--plot", tmp_path / "boxes.png")
    assert {row["candidate"] for row in rows if row["call_ms"]} == {"bmm", "bmm again", "einsum", "bsr"}
    assert all(row["joules"] == "" and row["status"] for row in rows) and (tmp_path / "boxes.png").stat().st_size > 5000
    assert run_recipe("factors.py energy", "--count", "1") == rows


def test_the_survey_of_patterns_has_the_columns_of_now() -> None:
    from factor_cases import FACTOR_COLUMNS

    columns, rows = read_table(RECIPES / "results" / "patterns_h200.csv")
    assert columns == [*FACTOR_COLUMNS, *STAMP] and rows


def test_rows_are_published_beside_those_of_other_tables(run_recipe: RunRecipe, run_program: object, tmp_path: Path) -> None:
    publish = run_program  # pyright: ignore
    rows = run_recipe("vits.py table6", *TINY_VIT, *ONE_LINEAR)
    results = tmp_path / "results.csv"
    results.write_text("table,unit,device,kept\ntable3,FFN,an H200,7\ntable6,gone," + f"{rows[0]['device']},\n")
    publish("publish.py", tmp_path / "rows.csv", "--table", "table6", "--into", results)  # pyright: ignore
    columns, found = read_table(results)
    assert columns[:4] == ["table", "unit", "kept", "model"] and columns[-1] == "commit" and "flops" not in columns
    assert [(row["table"], row["unit"], row["kept"]) for row in found] == [
        ("table3", "FFN", "7"),
        *(("table6", "linear N x N", "") for _ in rows),
    ]
