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

from flysurgery.checkpoint import load, load_dense
from flysurgery.evaluation import evaluate, load_data
from flysurgery.surgery import plan_of
from tests.cli.conftest import RANDOM, TINY, Document, Refused, Run, tiny_model

QUICK = ("--data", "digits", "--epochs", "1", "--batch-size", "256", "--cpu", "--workers", "0")


def test_a_converted_folder_is_trained_and_saved_with_its_plan(run: Run, document: Document, converted: Path) -> None:
    found = document("finetune", converted, *QUICK, "--out", "o", "--lr", "1e-3", "--save-every", "2", "--log-every", "1")
    before, after = load(converted), load("o")
    assert plan_of(after) == plan_of(before)
    assert not torch.equal(after.get_parameter("blocks.0.mlp.fc1.factors.0"), before.get_parameter("blocks.0.mlp.fc1.factors.0"))
    expected = evaluate(after, load_data("digits", after))
    assert (found["after"]["top1"], found["updates"], found["images"]) == (expected.top1, 4, 1024)
    report, earlier = (json.loads((Path(folder) / "report.json").read_text()) for folder in ("o", converted))
    settings = report["finetune"]["settings"]
    assert report["rows"] == earlier["rows"]
    assert (settings["learning_rate"], settings["save_every"], settings["log_every"]) == (1e-3, 2, 1)
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


def test_what_is_refused(refused: Refused, converted: Path, images: Path) -> None:
    finetune = ("finetune", converted, *QUICK, "--out")
    refused(*finetune, converted, words=("exists",))
    refused(*finetune, "o", "--blocks-weight", "1", words=("--teacher MODEL",), code=2)
    refused(*finetune, "o", "--optimizer", "bogus", words=("no optimizer 'bogus'",), code=2)
    refused(*finetune, "o", "--resume", words=("o.training", "no state"))
    refused("finetune", converted, "--data", "nothing", "--out", "o", words=("nothing", "fractals"))
    refused("finetune", *RANDOM, *QUICK, "--out", "o", "--teacher", "vit_tinny", words=("vit_tinny",))
    refused("finetune", converted, "--data", images, "--cpu", "--out", "o", words=("no folder of images for each class", "--teacher MODEL"))


def test_a_teacher_by_name_takes_the_options_that_describe_it(run: Run, converted: Path, images: Path) -> None:
    torch.save(tiny_model().state_dict(), "dense.pt")
    options = ("--data", images, "--minutes", "0.01", "--cpu", "--out", "o", "--teacher", *TINY, "--checkpoint", "dense.pt")
    done = run("finetune", converted, *options)
    assert done.code == 0 and "output cosine, 2 held-out samples" in done.out, done
