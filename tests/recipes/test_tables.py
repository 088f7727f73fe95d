"""Tables by recipes, on sizes that take seconds on a CPU: what is timed is right, what is not says why, and a second run goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import timm
import torch

from flysurgery.bench.rows import STAMP, read_table
from tests.recipes.conftest import RECIPES, TINY_VIT, RunRecipe, picture

ONE_PATTERN = ("--rows", "24", "--largest", "400", "--modes", "fp32", "--count", "1")


ONE_LINEAR = ("--batches", "1", "--modes", "fp32", "--protocols", "paper", "--parts", "linear N x N", "--candidates", "dense,bmm")


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


def test_a_run_that_goes_on_tells_models_of_one_name_apart(run_recipe: RunRecipe) -> None:
    first = run_recipe("vits.py table6", *TINY_VIT, *ONE_LINEAR)
    both = run_recipe("vits.py table6", *TINY_VIT, "--model-args", "embed_dim=96", *ONE_LINEAR)
    assert both[: len(first)] == first and len(both) == 2 * len(first)
    assert first[0]["model"].startswith("vit_small_patch16_224, embed_dim=48, depth=1") and "embed_dim=96" in both[-1]["model"]
    other = run_recipe("vits.py table6", *TINY_VIT, "--model", "vit_tiny_patch16_224", *ONE_LINEAR)[len(both) :]
    assert {row["paper_ratio"] for row in other} == {""}, "the paper has no such model"


SENTENCES = [
    ("vits.py table6", "--modes tf32", "there is no mode 'tf32' on cpu"),
    ("vits.py table6", "--candidates dense,bsm", "there is no 'bsm'; choose from dense, layer"),
    ("vits.py table6", "--parts blok", "no part of vit_small_patch16_224 is called blok; the parts are FFN, attention, block"),
    ("vits.py table6", "--launches grph", "there is no 'grph'; choose from graph, eager"),
    ("vits.py table6", "--launches graph", "there is nothing to measure by these options on this device"),
    ("factors.py patterns", "--largest 47", "--largest 47 leaves no pattern: the smallest has 48 features"),
    ("kernel_tables.py norm_linear", "--only lowrank", "--only lowrank matches none of the cases: fp32, gonon, 197; fp32, monarch, 197"),
    ("kernel_tables.py attention", "--rows 8", "attention has its own numbers of rows; leave --rows out"),
    ("real_weights.py", "--ways gonon,butterfly", "--ways knows no 'butterfly'"),
]


@pytest.mark.parametrize(("name", "options", "sentence"), SENTENCES)
def test_an_unknown_name_is_one_sentence(run_recipe: RunRecipe, capsys: Any, name: str, options: str, sentence: str) -> None:
    with pytest.raises(SystemExit) as stopped:
        run_recipe(name, *options.split())
    assert sentence in f"{stopped.value}{capsys.readouterr().err}"


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


def test_rivals_are_right_and_those_that_are_absent_say_why(run_recipe: RunRecipe, capsys: pytest.CaptureFixture[str]) -> None:
    rows = run_recipe("factors.py rivals", "--rows", "40", "--width", "48", "--modes", "fp32")
    square = {row["candidate"]: row for row in rows if row["layer"] == "square"}
    timed = {name for name, row in square.items() if row["median_ms"]}
    assert timed >= {"dense", "dense again", "butterfly", "low rank, two linears", "magnitude pruning, CSR"}
    assert square["low rank, two linears"]["note"] == "rank 6"  # as many weights as (1,24,6,2),(2,6,24,1): 576
    assert "CUDA" in square["2:4 semi-structured"]["status"] and all(row["status"] for row in rows)
    assert all(float(row["error"]) < 1e-6 for row in square.values() if row["error"])
    assert "magnitude pruning, CSR, square, fp32: " in capsys.readouterr().out


def test_calibration_keeps_the_digits(run_recipe: RunRecipe) -> None:
    dense, svd, calibrated = run_recipe("accuracy.py digits")
    assert dense["top1"] == "0.985" and float(svd["top1"]) < 0.97 < float(calibrated["top1"])
    for role in ("qkv", "ffn_in", "ffn_out"):
        assert float(calibrated[f"error_{role}"]) <= 0.7 * float(svd[f"error_{role}"])


def test_every_way_from_scratch_makes_the_same_updates(run_recipe: RunRecipe, monkeypatch: pytest.MonkeyPatch) -> None:
    first = run_recipe("from_scratch.py fractals", "--seconds", "0.01")
    dense, projected, monarch, low_rank, half, most = first
    assert [row["way"] for row in first[:4]] == ["dense", "dense, projected", "monarch", "low rank"]
    assert {row["updates"] for row in first} == {"4"} and {row["samples"] for row in first} == {"500"}
    sizes = [int(row["model_params"]) for row in (low_rank, monarch, projected, dense, half, most)]
    assert sizes[0] <= sizes[1] == sizes[2] < sizes[3] == sizes[4] == sizes[5]
    assert half["top1"] == most["top1"], "of two epochs both have one before their factors are multiplied out"
    assert [bool(row["forward_ms"]) for row in first] == [bool(row["top1_finetuned"]) for row in first] == [True] * 2 + [False] * 4
    monkeypatch.setattr("flysurgery.finetune.train", None)
    assert run_recipe("from_scratch.py fractals") == first, "nothing is trained again"


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


@pytest.fixture
def given(tmp_path: Path) -> tuple[object, ...]:
    """Eight photographs, and as ``--save`` keeps them a backbone of two blocks and a decoder of random weights."""
    from focus_model import BASE, BASE_ARGS, Decoder, FocusModel, save_focus

    (tmp_path / "p").mkdir()
    for number in range(8):
        picture(number).save(tmp_path / "p" / f"{number}.png")
    torch.manual_seed(0)
    backbone = timm.create_model(BASE, pretrained=False, **BASE_ARGS, depth=2, embed_dim=48, num_heads=2)
    for block in backbone.blocks:  # pyright: ignore
        for scale in (block.ls1, block.ls2):
            torch.nn.init.ones_(scale.gamma)
    save_focus(FocusModel(backbone, Decoder(48)).eval(), tmp_path / "w")
    return "--photographs", tmp_path / "p", "--weights", tmp_path / "w", "--judging", "3", "--minutes", "0.05"


def test_rows_of_real_weights(run_recipe: RunRecipe, given: tuple[object, ...], tmp_path: Path) -> None:
    ways = ("monarch 4 plain", "monarch 4 calibrated", "monarch 4 reconstructed")
    dense, plain, calibrated, reconstructed = first = run_recipe("real_weights.py", *given, "--ways", ",".join(ways))
    assert [row["way"] for row in first] == ["dense", *ways] and reconstructed["minutes"] == "0.05"
    assert float(dense["cls"]) == float(dense["patch"]) == float(dense["nearest"]) == 1 and float(dense["relative_error"]) == 0
    assert float(plain["cls"]) < float(calibrated["cls"]) < 1
    assert float(plain["params"]) == float(calibrated["params"]) < float(dense["params"])
    plot = tmp_path / "curve.png"
    second = run_recipe("real_weights.py", *given, "--ways", ",".join(ways), "--seeds", "2", "--plot", plot)
    assert second[:4] == first and plot.stat().st_size > 5000, "rows that are there stay"
    assert [(row["way"], row["seed"]) for row in second[4:]] == [(way, "1") for way in ways[1:]], "what is random"


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
