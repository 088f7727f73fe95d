"""Training on the command line: the page docs/imagenet.md as a user follows it, the digits, and what is refused."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from PIL import Image

from flysurgery.checkpoint import load, load_dense, save_dense
from flysurgery.evaluation import evaluate, load_data
from flysurgery.fidelity import VIEWS
from flysurgery.surgery import plan_of
from tests.cli.conftest import RANDOM, TINY, TINY_ARGUMENTS, TINY_BASE, Document, Refused, Run, tiny_model

QUICK = ("--data", "digits", "--epochs", "1", "--batch-size", "256", "--cpu", "--workers", "0")
CLASSES, TRAIN, VAL = 10, 12, 4


@pytest.fixture
def stand_in(run: Run, tmp_path: Path) -> None:
    """The folders ``imagenet``, with a folder of images a class in ``train`` and ``val``, ``photos`` without classes, and ``dense``."""
    draw = np.random.default_rng(0)
    for part, count in (("train", TRAIN), ("val", VAL)):
        for number in range(CLASSES):
            folder = tmp_path / "imagenet" / part / f"n{number:08}"
            folder.mkdir(parents=True)
            for index in range(count):
                coarse = Image.fromarray(draw.integers(0, 255, (10, 12, 3), np.uint8))
                coarse.resize((60, 50), Image.Resampling.BICUBIC).save(folder / f"{part}_{index:04}.JPEG")
    (tmp_path / "photos").mkdir()
    for number, path in enumerate(sorted((tmp_path / "imagenet" / "train").glob("*/*0.JPEG"))):
        path.rename(tmp_path / "photos" / f"{number}.jpg")
    save_dense(tiny_model(), tmp_path / "dense", TINY_BASE, TINY_ARGUMENTS, force=False)


@pytest.mark.usefixtures("stand_in")
def test_from_weights_to_an_evaluated_folder(document: Document, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flysurgery.fidelity.reconstruction.affordable", lambda *_: 3)
    fit = ("--calibrate", "imagenet/train", "--samples", 40, "--sequential", "--reconstruct", "--minutes", 1)
    converted = document("convert", "dense", "--arch", "monarch", *fit, "--evaluate", "imagenet/val", "--out", "fitted")
    accuracy, dense = converted["accuracy"], document("evaluate", "dense", "--data", "imagenet/val")
    assert accuracy["data"] == "imagenet/val" and accuracy["after"]["samples"] == CLASSES * VAL
    assert [accuracy["before"][name] for name in ("top1", "top5")] == [dense[name] for name in ("top1", "top5")]
    top1 = f"top-1 {accuracy['before']['top1']:.2%} before, {accuracy['after']['top1']:.2%} after"
    assert f"- Accuracy on imagenet/val: {top1}, of 40 samples" in Path("fitted/README.md").read_text()
    assert converted["calibration"]["samples"] == 40 and converted["calibration"]["sequential"] is True
    assert converted["reconstruction"]["updates"] == 3

    train = ("--teacher", "dense", "--epochs", 1, "--batch-size", 20, "--workers", 0, "--cpu")
    tuned = document("finetune", "fitted", "--data", "imagenet", *train, "--out", "tuned")
    assert tuned["labelled"] is True and tuned["updates"] == CLASSES * (TRAIN - 1) // 20
    assert tuned["before"]["top1"] == accuracy["after"]["top1"]
    assert tuned["after"]["samples"] == tuned["fidelity_after"]["samples"] == CLASSES * VAL
    again = document("evaluate", "tuned", "--data", "imagenet/val")
    assert [again[name] for name in ("top1", "top5")] == [tuned["after"][name] for name in ("top1", "top5")]
    fidelity = document("evaluate", "tuned", "--against", "dense", "--data", "imagenet/val")
    assert fidelity["relative_error"] == pytest.approx(tuned["fidelity_after"]["relative_error"], rel=1e-3)

    photos = ("--data", "photos", *train[:4], "--cpu", "--evaluate", "imagenet/val", "--out", "unlabelled")
    unlabelled = document("finetune", "fitted", *photos)
    assert unlabelled["labelled"] is False and unlabelled["after"]["samples"] == CLASSES * VAL
    assert unlabelled["images"] == len(list(Path("photos").iterdir())) // VIEWS["cpu"] * VIEWS["cpu"], "an epoch has whole batches"
    assert unlabelled["fidelity_after"]["relative_error"] <= unlabelled["fidelity_before"]["relative_error"]
    columns = Path("unlabelled.training/log.csv").read_text().splitlines()[0]
    assert columns.endswith("relative_error,output_cosine,token_cosine")
    assert json.loads(Path("unlabelled/report.json").read_text())["finetune"]["settings"]["optimizer"] == "muon"


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


def test_sparse_to_dense_from_scratch_and_a_teacher_by_its_name(run: Run, converted: Path, images: Path) -> None:
    run("finetune", converted, *QUICK[:2], "--epochs", "2", *QUICK[4:], "--densify-after", "1", "--scratch", "--out", "d")
    dense, _, _ = load_dense("d")
    again = timm.create_model("local-dir:d", pretrained=True).eval()
    image = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        assert torch.equal(dense(image), again(image))
    assert run("finetune", *TINY, "--scratch", *QUICK, "--out", "n", "--teacher", "d", "--seed", "3").code == 0
    assert load_dense("n")[1] == TINY_BASE
    torch.save(tiny_model().state_dict(), "dense.pt")
    options = ("--data", images, "--minutes", "0.01", "--cpu", "--out", "o", "--teacher", *TINY, "--checkpoint", "dense.pt")
    done = run("finetune", converted, *options)
    assert done.code == 0 and "output cosine, 2 held-out samples" in done.out, done


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


def test_what_is_refused(refused: Refused, converted: Path, images: Path) -> None:
    finetune = ("finetune", converted, *QUICK, "--out")
    refused(*finetune, converted, words=("exists",))
    refused(*finetune, "o", "--blocks-weight", "1", words=("--teacher MODEL",), code=2)
    refused(*finetune, "o", "--optimizer", "bogus", words=("no optimizer 'bogus'",), code=2)
    refused(*finetune, "o", "--resume", words=("o.training", "no state"))
    refused("finetune", converted, "--data", "nothing", "--out", "o", words=("nothing", "fractals"))
    refused("finetune", *RANDOM, *QUICK, "--out", "o", "--teacher", "vit_tinny", words=("vit_tinny",))
    refused("finetune", converted, "--data", images, "--cpu", "--out", "o", words=("no folder of images for each class", "--teacher MODEL"))
