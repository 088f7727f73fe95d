"""The page docs/imagenet.md as a user follows it, on ten classes of generated photographs in ImageNet's layout."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from flysurgery.checkpoint import build_base, load, save_dense
from flysurgery.fidelity import VIEWS
from tests.cli.conftest import Document, Run

BASE, ARGUMENTS = "vit_tiny_patch16_224", {"img_size": 32, "patch_size": 8, "embed_dim": 64, "num_heads": 2, "depth": 2, "num_classes": 10}
CLASSES, TRAIN, VAL = 10, 12, 4


@pytest.fixture(autouse=True)
def few_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three updates of the reconstruction, whatever the budget."""
    monkeypatch.setattr("flysurgery.fidelity.reconstruction._affordable", lambda *_: 3)


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
    torch.manual_seed(0)
    save_dense(build_base(BASE, ARGUMENTS).eval(), tmp_path / "dense", BASE, ARGUMENTS, force=False)


@pytest.mark.usefixtures("stand_in")
def test_from_weights_to_an_evaluated_folder(document: Document) -> None:
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
    assert tuned["before"]["top1"] == converted["accuracy"]["after"]["top1"] and tuned["after"]["samples"] == CLASSES * VAL
    assert tuned["fidelity_after"]["samples"] == CLASSES * VAL

    unlabelled = document(
        "finetune", "fitted", "--data", "photos", *train[:4], "--cpu", "--evaluate", "imagenet/val", "--out", "unlabelled"
    )
    assert unlabelled["labelled"] is False
    assert unlabelled["images"] == len(list(Path("photos").iterdir())) // VIEWS["cpu"] * VIEWS["cpu"], "an epoch has whole batches"
    assert unlabelled["fidelity_after"]["relative_error"] <= unlabelled["fidelity_before"]["relative_error"]
    columns = Path("unlabelled.training/log.csv").read_text().splitlines()[0]
    settings = json.loads(Path("unlabelled/report.json").read_text())["finetune"]["settings"]
    assert settings["optimizer"] == "muon" and columns.endswith("relative_error,output_cosine,token_cosine")
    assert unlabelled["after"]["samples"] == CLASSES * VAL

    accuracy = document("evaluate", "tuned", "--data", "imagenet/val")
    assert {name: accuracy[name] for name in ("top1", "top5")} == {name: tuned["after"][name] for name in ("top1", "top5")}
    fidelity = document("evaluate", "tuned", "--against", "dense", "--data", "imagenet/val")
    assert {"output_cosine", "token_cosine", "relative_error", "agreement", "blocks"} <= fidelity.keys()
    assert fidelity["relative_error"] == pytest.approx(tuned["fidelity_after"]["relative_error"], rel=1e-3)
    with torch.inference_mode():
        assert load("tuned")(torch.zeros(1, 3, 32, 32)).shape == (1, CLASSES)
