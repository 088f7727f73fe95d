"""Fine-tuning on the command line: the whole chain on the digits, and what is refused."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from PIL import Image

from flysurgery.checkpoint import build_base, load, load_dense, save, save_dense
from flysurgery.evaluation import evaluate, load_data
from flysurgery.inference import convert
from flysurgery.surgery import plan_of
from tests.cli.conftest import RANDOM, TINY, TINY_ARGUMENTS, TINY_BASE, Document, Refused, Run

QUICK = ("--data", "digits", "--epochs", "1", "--batch-size", "256", "--cpu", "--workers", "0")


def test_a_converted_folder_is_trained_and_saved_with_its_plan(run: Run, document: Document, converted: Path) -> None:
    found = document("finetune", converted, *QUICK, "--out", "o", "--lr", "1e-3")
    before, after = load(converted), load("o")
    assert plan_of(after) == plan_of(before)
    assert not torch.equal(after.get_parameter("blocks.0.mlp.fc1.factors.0"), before.get_parameter("blocks.0.mlp.fc1.factors.0"))
    expected = evaluate(after, load_data("digits", after))
    assert (found["after"]["top1"], found["updates"], found["images"]) == (expected.top1, 4, 1024)
    report, earlier = (json.loads((Path(folder) / "report.json").read_text()) for folder in ("o", converted))
    assert report["rows"] == earlier["rows"] and report["finetune"]["settings"]["learning_rate"] == 1e-3
    assert f"top-1 {found['before']['top1']:.2%} before, {expected.top1:.2%} after" in Path("o/README.md").read_text()
    assert Path("o.training/log.csv").read_text().startswith("update,epoch,loss,")
    done = run("finetune", converted, *QUICK, "--out", "o", "--force").out.splitlines()
    assert done[0].split() == ["fine-tuning", "before", "after", "change"] and done[-1].startswith("saved in o, log in o.training")


NO_REPORTS: list[Any] = ["{", "[]", "null", '{"rows": 3}', '{"fidelity": {"samples": 1}}', 2000 * "[", Path.mkdir]
if os.name != "nt":
    NO_REPORTS += [os.mkfifo, lambda file: file.symlink_to("/dev/zero")]


@pytest.mark.parametrize("content", NO_REPORTS)
def test_a_damaged_report_is_found_before_the_training(content: Any, refused: Refused, converted: Path) -> None:
    file = Path(shutil.copytree(converted, "damaged")) / "report.json"
    is_text = isinstance(content, str)
    file.unlink()
    file.write_text(content) if is_text else content(file)
    refused("finetune", "damaged", *QUICK, "--out", "o", words=("report.json", "" if is_text else "expected a regular file"))


def test_sparse_to_dense_and_from_scratch(run: Run, converted: Path) -> None:
    run("finetune", converted, *QUICK[:2], "--epochs", "2", *QUICK[4:], "--densify-after", "1", "--scratch", "--out", "d")
    dense, _, _ = load_dense("d")
    again = timm.create_model("local-dir:d", pretrained=True).eval()
    image = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        assert torch.equal(dense(image), again(image))
    assert run("finetune", *TINY, "--scratch", *QUICK, "--out", "n", "--teacher", "d", "--seed", "3").code == 0
    assert load_dense("n")[1] == TINY[0]


@pytest.fixture
def headless(run: Run, tmp_path: Path) -> Path:
    """A folder with the tiny model without a head, ``dense`` and ``tiny``, and 24 ``pictures``."""
    arguments = TINY_ARGUMENTS | {"num_classes": 0}
    torch.manual_seed(0)
    model = build_base(TINY_BASE, arguments).eval()
    save_dense(model, tmp_path / "dense", TINY_BASE, arguments, force=False)
    save(model, tmp_path / "tiny", report=convert(model, base=TINY_BASE, base_args=arguments))
    (tmp_path / "pictures" / "more").mkdir(parents=True)
    for number in range(24):
        picture = Image.effect_noise((50, 40), 10 * number).convert("RGB")
        picture.save(tmp_path / "pictures" / ("more" if number % 2 else "") / f"{number:02}.png")
    return tmp_path


def test_a_model_without_a_head_learns_from_a_folder_without_labels(run: Run, headless: Path) -> None:
    command = ("finetune", "tiny", "--data", "pictures", "--teacher", "dense", "--cpu", "--epochs", "4")
    lines = run(*command, "--out", "o").out.splitlines()
    report = json.loads(Path("o/report.json").read_text())["finetune"]
    assert lines[0].split() == ["fine-tuning", "before", "after", "change"]
    assert any(line.startswith("pictures is used without labels; the state of update ") for line in lines)
    assert report["labelled"] is False and report["settings"]["optimizer"] == "muon" and report["images"] == 4 * 21
    assert report["fidelity_after"]["relative_error"] <= report["fidelity_before"]["relative_error"]
    columns = Path("o.training/log.csv").read_text().splitlines()[0].split(",")
    assert columns[-3:] == ["relative_error", "output_cosine", "token_cosine"]
    assert run(*command, "--out", "e", "--evaluate", "pictures/more", "--json").code == 0
    assert json.loads(Path("e/report.json").read_text())["finetune"]["fidelity_after"]["samples"] == 12


def test_what_is_refused_without_labels(refused: Refused, run: Run, headless: Path) -> None:
    command = ("finetune", "tiny", "--data", "pictures", "--cpu", "--out", "o")
    refused(*command, words=("no head", "--teacher MODEL"))
    taught = (*command, "--teacher", "dense")
    refused(*taught, "--minutes", "0", words=("minutes must be a positive number, got 0",), code=2)
    refused(*taught, "--minutes", "1", "--epochs", "1", words=("epochs and minutes",), code=2)
    refused(*taught, "--batch-size", "64", words=("21 images", "one batch of 64", "lower the batch size"))
    for path in Path("pictures").rglob("*.png"):
        Image.new("RGB", (40, 40), (9, 9, 9)).save(path)
    refused(*taught, words=("of one colour", "give photographs"))


def test_what_is_refused(run: Run, refused: Refused, converted: Path) -> None:
    finetune = ("finetune", converted, *QUICK, "--out")
    refused(*finetune, converted, words=("exists",))
    refused(*finetune, "o", "--blocks-weight", "1", words=("--teacher MODEL",), code=2)
    refused(*finetune, "o", "--warm-up", "2", words=("warm_up", "2"), code=2)
    refused(*finetune, "o", "--augment", "bogus", words=("policy of augmentation",), code=2)
    refused(*finetune, "o", "--optimizer", "bogus", words=("no optimizer 'bogus'",), code=2)
    refused(*finetune, "o", "--resume", words=("o.training", "no state"))
    refused("finetune", converted, "--data", "nothing", "--out", "o", words=("nothing", "fractals"))
    refused("finetune", *RANDOM, *QUICK, "--out", "o", "--teacher", "vit_tinny", words=("vit_tinny",))
    other = build_base(TINY_BASE, TINY_ARGUMENTS | {"num_classes": 7})
    save_dense(other, Path("t"), TINY_BASE, TINY_ARGUMENTS | {"num_classes": 7}, force=False)
    refused(*finetune, "o", "--teacher", "t", words=("10 classes apart", "7"))
