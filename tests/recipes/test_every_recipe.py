"""What holds of each recipe: it tells what it does, and what stands in its way is one sentence."""

import re
import runpy
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

from flysurgery.bench.rows import read_table
from tests.recipes.conftest import RECIPES

INDEX = runpy.run_path(str(RECIPES / "index.py"))
RunProgram = Callable[..., None]


def tables_of(text: str) -> list[str]:
    """The names of a recipe's tables, by its docstring."""
    listed = re.search(r"\n *The tables:\n\n(.+?)\n\n", text, re.DOTALL)
    return re.findall(r"^    (\w+) ", listed[1], re.MULTILINE) if listed else []


COMMANDS = [" ".join((name, *table)) for name, text in INDEX["programs"]().items() for table in [(), *zip(tables_of(text))]]
"""Each recipe, and those of several tables once more for each."""

NEED_CUDA = [
    *("accuracy.py fractals", "from_scratch.py fractals", "gate.py", "real_weights.py --photographs ."),
    *("factors.py energy", "vits.py optimized", "vits.py headline", "vits.py training", "vits.py finetune"),
    *(command for command in COMMANDS if command.startswith("kernel_tables.py ")),
]


@pytest.mark.parametrize("command", COMMANDS)
def test_help_says_how_it_is_called(run_program: RunProgram, capsys: pytest.CaptureFixture[str], command: str) -> None:
    with pytest.raises(SystemExit, match="0"):
        run_program(command, "--help")
    text = capsys.readouterr().out
    assert f"recipes/{command.split()[0]}" in text and ("--quick" in text or "The tables:" in text)


def test_every_file_is_a_recipe_or_imported_by_one() -> None:
    names, texts = {path.stem for path in RECIPES.glob("*.py")}, [path.read_text(encoding="utf-8") for path in RECIPES.glob("*.py")]
    imported = {name for text in texts for name in re.findall(r"^ *(?:from|import) (\w+)", text, re.MULTILINE)}
    assert names - imported - {Path(name).stem for name in INDEX["programs"]()} == {"index", "publish"}


def test_the_index_is_what_the_docstrings_say() -> None:
    assert (RECIPES / "README.md").read_text(encoding="utf-8") == INDEX["page"](), "python recipes/index.py writes it"


def test_a_page_links_to_every_table_of_rows() -> None:
    pages = [RECIPES / "README.md", *(RECIPES.parent / "docs").glob("*.md")]
    linked = {name for page in pages for name in re.findall(r"results/([\w.]+)\)", page.read_text(encoding="utf-8"))}
    assert {path.name for path in (RECIPES / "results").iterdir()} - linked == set()


@pytest.mark.skipif(torch.cuda.is_available(), reason="it is about machines without CUDA")
@pytest.mark.parametrize("command", NEED_CUDA)
def test_without_a_gpu_it_says_so_and_writes_nothing(run_program: RunProgram, tmp_path: Path, command: str) -> None:
    with pytest.raises(SystemExit, match=r"^[^\n]*(CUDA device|NVIDIA GPU)[^\n]*$"):
        run_program(command)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", ["accuracy.py digits", "kernel_tables.py factor_gradients"])
def test_no_recipe_writes_over_another_table(run_program: RunProgram, tmp_path: Path, command: str) -> None:
    other = tmp_path / "other.csv"
    other.write_text("fruit,price\napple,1\n")
    with pytest.raises(SystemExit, match="no table of measurements"):
        run_program(command, "--quick", "--out", other)
    assert other.read_text() == "fruit,price\napple,1\n" and list(tmp_path.iterdir()) == [other]
    with pytest.raises(SystemExit, match="--out takes a file"):
        run_program(command, "--quick", "--out", tmp_path)


QUICK = "--quick --device cpu --out rows.csv"
SENTENCES = [
    (f"vits.py table3 {QUICK} --batch 8,0", "argument --batch: expected a number above zero, got '0'"),
    (f"vits.py table6 {QUICK} --seconds -1", "argument --seconds: expected a number above zero, got '-1'"),
    (f"factors.py patterns {QUICK} --minutes nan", "argument --minutes: expected a number above zero, got 'nan'"),
    (f"vits.py table6 {QUICK} --mode tf32", "there is no mode 'tf32' on cpu"),
    (f"vits.py table6 {QUICK} --candidates dense,bsm", "there is no 'bsm'; choose from dense, dense optimized, layer"),
    (f"vits.py table6 {QUICK} --unit blok", "there is no 'blok'; choose from linear N x N"),
    (f"vits.py table6 {QUICK} --launch grph", "there is no 'grph'; choose from graph, eager"),
    (f"vits.py table6 {QUICK} --launch graph", "there is nothing to measure by these options on this device"),
    (f"kernel_tables.py norm_linear {QUICK} --only lowrank", "cases are norm and q, k, v, 384, gonon, fp32, 197"),
    (f"transforms.py times {QUICK} --n 12", "bit reversal needs a power of two, got 12"),
    (f"real_weights.py {QUICK} --ways gonon,butterfly", "--ways knows no 'butterfly'"),
    (f"real_weights.py {QUICK}", "--photographs takes a folder"),
    (f"factors.py rivals {QUICK} --rows 10000000000000", "does not fit into this machine's memory"),
    ("survey_models.py timm --out out --only [", "expected a regular expression, got '['"),
    ("survey_models.py vit_pytorch --out out --only resnet", "there is nothing to measure by these options on this device; cases are"),
    ("gate.py --quick --only [", "argument --only: expected a regular expression, got '['"),
    ("gate.py --quick --base .", "--base takes a checkout that has this recipe, and there is no"),
]


@pytest.mark.parametrize(("command", "sentence"), SENTENCES)
def test_what_cannot_be_meant_is_one_sentence(
    run_program: RunProgram, tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str, sentence: str
) -> None:
    with pytest.raises(SystemExit) as stopped:
        run_program(command)
    assert sentence in f"{stopped.value}{capsys.readouterr().err}" and list(tmp_path.iterdir()) == []


def test_a_quick_survey_is_one_small_model(run_program: RunProgram, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "survey.csv"
    run_program("survey_models.py vit_pytorch", "--quick", "--out", out)
    (row,) = read_table(out)[1]
    assert (row["model"], row["converted"], row["output_kept"], row["replaced"]) == ("vit:ViT", "True", "True", "8")
    assert row["library"] == f"vit-pytorch {version('vit-pytorch')}"
    before = out.read_text()
    run_program("survey_models.py vit_pytorch", "--quick", "--out", out)
    assert out.read_text() == before and "1 rows are there already" in capsys.readouterr().err
