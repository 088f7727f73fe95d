"""What holds of each recipe: it tells what it does, and what stands in its way is one sentence."""

from __future__ import annotations

import re
import runpy
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest
import timm
import torch

from flysurgery.bench.rows import read_table
from tests.recipes.conftest import RECIPES, TINY_VIT, RunRecipe

SHARED = {"recipe", "tables", "kernel_ablation", "kernel_cases", "kernel_operations", "vit_models", "accuracy_cases", "survey_cases"} | {
    *("photograph_packages", "photograph_rule", "photograph_crops", "focus_model", "sight", "weight_ways", "weight_rows", "weight_rivals"),
    *("gate_cases", "loader_cases", "index"),
}
"""Modules that recipes import, and the one that lists the recipes."""

NAMES = sorted(path.name for path in RECIPES.glob("*.py") if path.stem not in SHARED)

TABLES = {
    "kernels.py": (
        "attention",
        "norm_linear",
        "fused_linear",
        "factor_grad",
        "fused_ffn",
        "few_rows",
        "gated_ffn",
        "wide",
        "fused_ablation",
    ),
    "factors.py": ("patterns", "energy", "rivals"),
    "vits.py": ("table3", "table6", "cpu", "table5", "optimized", "training"),
}
"""The tables of the recipes that make several."""

COMMANDS = [command for name in NAMES for command in ([f"{name} {table}" for table in TABLES[name]] if name in TABLES else [name])]
"""All recipes, those of several tables once for each."""

ANYWHERE = {
    "calibration_cost",
    "digits_accuracy",
    "photographs",
    "survey_models",
    "train_digits_vit",
    "fractal_accuracy",
    "fuzz_loader",
    "stream_order",
} | {*("vits.py cpu", "factors.py patterns", "factors.py rivals", "vits.py table3", "vits.py table6", "vits.py table5")}
"""Those that run without CUDA."""

CHECKS = {"sanitize_kernels"}
"""Those that time nothing: a CPU has nothing for them."""


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    """Some recipes set how many threads their process has."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def run(monkeypatch: pytest.MonkeyPatch, name: str, *arguments: str) -> None:
    monkeypatch.syspath_prepend(str(RECIPES))
    monkeypatch.setattr(sys, "argv", [*name.split(), *arguments])
    runpy.run_path(str(RECIPES / sys.argv[0]), run_name="__main__")


@pytest.mark.parametrize("name", [*NAMES, *COMMANDS])
def test_help_says_how_it_is_called(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str) -> None:
    with pytest.raises(SystemExit, match="0"):
        run(monkeypatch, name, "--help")
    text = capsys.readouterr().out
    program, *table = name.split()
    assert f"recipes/{program}" in text, "its description holds the command"
    assert (program in TABLES and not table) or "--quick" in text
    assert not table or f"\n    {table[0]} " in text, "its description names the table"
    assert f"\n| `{program}` |" in (RECIPES / "README.md").read_text(), "the index names it"


def test_the_index_is_what_the_docstrings_say() -> None:
    page = runpy.run_path(str(RECIPES / "index.py"))["page"]()
    assert (RECIPES / "README.md").read_text(encoding="utf-8") == page, "python recipes/index.py writes it"


def test_a_page_links_to_every_table_of_rows() -> None:
    pages = [RECIPES / "README.md", *(RECIPES.parent / "docs").glob("*.md")]
    linked = {name for page in pages for name in re.findall(r"results/([\w.]+)\)", page.read_text(encoding="utf-8"))}
    tables = [path.name for path in (RECIPES / "results").iterdir() if path.suffix in (".csv", ".txt")]
    assert [name for name in sorted(tables) if name not in linked] == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="it is about machines without CUDA")
@pytest.mark.parametrize("name", [name for name in COMMANDS if name.removesuffix(".py") not in ANYWHERE])
def test_without_a_gpu_it_says_so_and_writes_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stopped:
        run(monkeypatch, name)
    assert isinstance(stopped.value.code, str) and stopped.value.code.count("\n") == 0
    assert "CUDA device" in stopped.value.code or "NVIDIA GPU" in stopped.value.code
    assert "--quick" in stopped.value.code or Path(name).stem in CHECKS
    if Path(name).stem in CHECKS:
        with pytest.raises(SystemExit, match="this needs a CUDA device, and PyTorch finds none"):
            run(monkeypatch, name, "--quick")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "option", "value"),
    [
        ("vits.py table3", "--batches", "8,0"),
        ("vits.py table3", "--batches", "x"),
        ("vits.py table6", "--threads", "0"),
        ("vits.py table6", "--seconds", "-1"),
        ("factors.py patterns", "--rows", "-3"),
        ("factors.py patterns", "--minutes", "nan"),
        ("factors.py patterns", "--largest", "0"),
        ("factors.py rivals", "--width", "1.5"),
        ("vits.py cpu", "--batches", "0"),
        ("vits.py table5", "--batch", "-1"),
        ("factors.py energy", "--windows", "0"),
    ],
)
def test_numbers_that_are_none_are_refused(
    run_recipe: RunRecipe, capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str, option: str, value: str
) -> None:
    with pytest.raises(SystemExit, match="2"):
        run_recipe(name, option, value)
    part = value.rpartition(",")[2]
    assert f"argument {option}: expected a number above zero, got '{part}'" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_rows_that_cannot_be_kept_are_not_measured(run_recipe: RunRecipe, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="--out takes a file"):
        run_recipe("factors.py rivals", "--out", str(tmp_path))
    other = tmp_path / "other.csv"
    other.write_text("fruit,price\napple,1\n")
    with pytest.raises(SystemExit, match="no table of measurements"):
        run_recipe("factors.py patterns", "--out", str(other))
    assert other.read_text() == "fruit,price\napple,1\n"


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("digits_accuracy.py", ("--quick",)),
        ("fractal_accuracy.py", ("--quick", "--device", "cpu")),
        ("calibration_cost.py", ("--quick", "--device", "cpu")),
        ("finetune_on_two_gpus.py", ("--quick", "--device", "cpu")),
    ],
)
def test_no_recipe_writes_over_another_table(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, arguments: tuple[str, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    other = tmp_path / "other.csv"
    other.write_text("fruit,price\napple,1\n")
    with pytest.raises(SystemExit, match="no table of measurements"):
        run(monkeypatch, name, *arguments, "--out", str(other))
    assert other.read_text() == "fruit,price\napple,1\n" and list(tmp_path.iterdir()) == [other]


@pytest.mark.parametrize(
    ("name", "arguments", "sentence"),
    [
        ("survey_models.py", ("timm", "--only", "["), r"--only takes a regular expression, got '\['"),
        ("survey_models.py", ("vit_pytorch", "--only", "resnet"), "--only resnet matches no model of vit_pytorch"),
        ("train_digits_vit.py", (), "--out takes a folder"),
        ("finetune_on_two_gpus.py", ("--quick", "--device", "cpu", "--arch", "butterfly"), "arch must be one of"),
        ("factors.py rivals", ("--quick", "--device", "cpu", "--rows", str(10**13)), "does not fit into this machine's memory"),
    ],
)
def test_what_cannot_be_meant_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, arguments: tuple[str, ...], sentence: str
) -> None:
    out = tmp_path / "out"
    if name == "train_digits_vit.py":
        out.write_text("a file")
    before = list(tmp_path.iterdir())
    with pytest.raises(SystemExit, match=sentence):
        run(monkeypatch, name, *arguments, "--out", str(out))
    assert list(tmp_path.iterdir()) == before


def test_a_survey_adds_to_no_other_table(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    other = tmp_path / "other.csv"
    other.write_text("model,price\napple,1\n")
    with pytest.raises(SystemExit, match=r"other\.csv is no table of measurements"):
        run(monkeypatch, "survey_models.py", "timm", "--out", str(other))
    assert other.read_text() == "model,price\napple,1\n"


def test_where_there_was_no_time_nothing_is_drawn(run_recipe: RunRecipe, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(FileNotFoundError):
        run_recipe("factors.py patterns", "--minutes", "1e-9", "--plot", str(tmp_path / "boxes.png"))
    assert "measurements are left for the next run" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def test_without_graphs_there_is_nothing_to_measure(run_recipe: RunRecipe) -> None:
    with pytest.raises(SystemExit, match="nothing to measure by launches graph"):
        run_recipe("vits.py table6", *TINY_VIT, "--launches", "graph")


def test_calibration_has_its_cost_and_goes_on(run_recipe: RunRecipe, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = run_recipe("calibration_cost.py", "--samples", "8", "--cases", "calibrated")
    assert [row["role"] for row in first] == ["qkv", "ffn_in", "ffn_out"]
    assert all(float(row["mean_output_error"]) < float(row["mean_plain_output_error"]) for row in first)
    assert first[0]["model"] == "vit_small_patch16_224, 1 blocks, random weights" and first[0]["device"]
    plot = tmp_path / "bars.png"
    assert run_recipe("calibration_cost.py", "--samples", "8", "--cases", "calibrated", "--plot", str(plot)) == first
    assert plot.stat().st_size > 5000 and "ffn_out" in capsys.readouterr().out


def test_a_quick_survey_is_one_small_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "survey.csv"
    run(monkeypatch, "survey_models.py", "vit_pytorch", "--quick", "--out", str(out))
    (row,) = read_table(out)[1]
    assert (row["model"], row["converted"], row["output_kept"], row["replaced"]) == ("vit:ViT", "True", "True", "8")
    assert (row["library"], row["torch"], row["threads"]) == (f"vit-pytorch {version('vit-pytorch')}", torch.__version__, "1")
    assert row["commit"] and "8 replaced" in capsys.readouterr().out
    run(monkeypatch, "survey_models.py", "vit_pytorch", "--quick", "--out", str(out))
    assert "replaced" not in capsys.readouterr().out, "it is there already"
    out.write_text(out.read_text().replace(row["commit"], "an older one"))
    run(monkeypatch, "survey_models.py", "vit_pytorch", "--quick", "--out", str(out))
    assert [each["commit"] for each in read_table(out)[1]] == [row["commit"]], "surveyed anew"


def test_a_quick_training_makes_a_model_that_timm_reads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    run(monkeypatch, "train_digits_vit.py", "--quick")
    model = timm.create_model("local-dir:build/digits_vit", pretrained=True)
    assert model.num_classes == 10 and ", 1 epochs" in (tmp_path / "build/digits_vit/README.md").read_text()


def test_fine_tuning_in_a_process_of_its_own_has_a_row(run_recipe: RunRecipe, tmp_path: Path) -> None:
    (row,) = run_recipe("finetune_on_two_gpus.py", "--ways", "one")
    assert (row["way"], row["processes"], row["updates"], row["status"]) == ("one", "1", "3", "ok")
    assert float(row["images_per_second"]) > 0 and float(row["ratio_to_one"]) == 1
    plot = tmp_path / "bars.png"
    assert run_recipe("finetune_on_two_gpus.py", "--ways", "one", "--plot", str(plot)) == [row]
    assert plot.stat().st_size > 5000
