"""Bad input, as a user gives it: one sentence, a non-zero exit code, and nothing written or changed."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest
import torch

from flysurgery import surgery
from tests.cli.conftest import RANDOM, TINY, Refused, tiny_model

VIT_S = "vit_small_patch16_224"


@pytest.fixture
def no_projection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is refused in a test with this fixture is refused before the expensive work."""

    def too_late(*_: object, **__: object) -> None:
        raise AssertionError("the work began before the check")

    monkeypatch.setattr(surgery, "apply", too_late)


@pytest.mark.usefixtures("no_projection")
@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("vit_smal_patch16_224",), 1, ("vit_smal_patch16_224", "nearest names", VIT_S)),
        (("vit_small_patch16_224.imagenet99",), 1, ("imagenet99", "vit_small_patch16_224.dino")),
        (("models/vit",), 1, ("no file or folder models/vit",)),
        (("weights.safetensors",), 1, ("no file or folder weights.safetensors",)),
        (("vit_pytorch:Transformator", "--no-pretrained"), 1, ("Transformator",)),
        (("vit_pytorch:ViT", "--no-pretrained"), 1, ("image_size",)),
        (("os:system", "--no-pretrained"), 1, ("vit_pytorch:CLASS", "os:system")),
        ((*RANDOM, "--model-args", "deppth=3"), 1, ("deppth",)),
        ((*RANDOM, "--model-args", "depth"), 2, ("key=value", "'depth'")),
        ((*RANDOM, "--model-args", '{"depth": ' + 700 * "[" + 700 * "]" + "}"), 2, ("--model-args", "more than 32 levels")),
        ((*RANDOM, "--model-args", '{"depth": ' + 99999 * "[" + 99999 * "]" + "}"), 2, ("--model-args",)),
        ((*RANDOM, "--include", "no_such_layer"), 2, ("no_such_layer", "blocks.0")),
        ((*RANDOM, "--include", "(["), 2, ("regular expression", "([")),
        ((*RANDOM, "--roles", "fnn"), 2, ("fnn", "ffn")),
        ((*RANDOM, "--rank", "3"), 2, ("rank", "monarch")),
        ((*RANDOM, "--include", "fc1", "--patterns", "(1,9,3,4),(4,3,5,1)"), 1, ("256x64", "36x20")),
        ((*RANDOM, "--patterns", "1,2,3"), 1, ("1,2,3",)),
        ((*RANDOM, "--patterns", "(1,2,3,4),(5,6,7,8)"), 1, ("12", "240")),
        ((*RANDOM, "--patterns", "(1,99999999,99999999,1)"), 1, ("99999999",)),
        ((*RANDOM, "--nblocks", "7"), 1, ("nothing would be replaced", "7")),
        ((*RANDOM, "--device", "abacus"), 2, ("abacus",)),
        ((*TINY, "--checkpoint", "missing.pt"), 1, ("missing.pt",)),
        ((*TINY, "--base", VIT_S), 2, ("--base",)),
        (("vit_pytorch:ViT",), 1, ("--checkpoint FILE", "--no-pretrained")),
        ((*RANDOM, "--evaluate", "no/such/data"), 1, ("no/such/data",)),
        ((*RANDOM, "--samples", "20"), 2, ("--samples", "--calibrate")),
        ((*RANDOM, "--sequential", "--permute"), 2, ("--sequential and --permute need data", "--calibrate")),
        ((*RANDOM, "--calibrate", "nowhere"), 1, ("there is no data set 'nowhere'",)),
        ((*RANDOM, "--out", "model.safetensors"), 1, ("model.safetensors is the name of a file", "give a folder, such as", "/model")),
        ((*RANDOM, "--out", "."), 1, ("the folder that this runs in",)),
        ((*RANDOM, "--out", "", "--force"), 1, ("the folder that this runs in",)),
    ],
)
def test_convert_refuses(refused: Refused, arguments: tuple[str, ...], code: int, words: tuple[str, ...]) -> None:
    refused("convert", "--out", "made/here", *arguments, words=words, code=code)


@pytest.mark.usefixtures("no_projection")
def test_folders_that_cannot_be_written(refused: Refused, converted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(converted, "old")
    for verb in (("convert", *RANDOM), ("densify", converted)):
        refused(*verb, "--out", "old", words=("old", "--force"))
    Path("photos").mkdir()
    Path("photos/cat.jpg").write_bytes(b"miaow")
    convert = ("convert", *RANDOM, "--force", "--out")
    refused(*convert, "photos", words=("photos", "no flysurgery checkpoint"))
    refused(*convert, "photos/cat.jpg", words=("cat.jpg", "is a file"))
    refused(*convert, "photos/cat.jpg/deeper", words=("photos/cat.jpg/deeper", "Not a directory"))
    if sys.platform == "linux":  # a folder in which not even root may write
        refused(*convert, "/sys/made", words=("/sys/made could not be written", "in /sys"))
    usage = shutil.disk_usage("/")._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    refused(*convert, "o", words=("MB", "0.0 MB left"))


def test_no_space_in_the_middle_of_writing_leaves_nothing(refused: Refused, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(sys.modules["flysurgery.checkpoint.save"], "save_file", full)
    refused("convert", *RANDOM, "--out", "made/here", words=("made/here", "No space left on device"))


class Command:
    """What a pickle may hold besides tensors."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (os.mkdir, ("hacked",))


def test_weights_that_do_not_fit_or_are_none(refused: Refused, tmp_path: Path) -> None:
    convert = ("convert", *TINY, "--checkpoint", tmp_path / "weights.pt", "--out", "o")
    torch.save({"weights": Command()}, tmp_path / "weights.pt")
    refused(*convert, words=("weights.pt", "never unpickled"))
    weights = dict(tiny_model().state_dict())
    weights["blocks.1.mlp.fc2.weight"][2, 3] = float("nan")
    torch.save(weights, tmp_path / "weights.pt")
    refused(*convert, words=("blocks.1.mlp.fc2",))
    del weights["blocks.0.mlp.fc1.bias"]
    weights |= {"blocks.1.mlp.fc1.weight": torch.zeros(3, 5), "stranger": torch.zeros(1)}
    torch.save(weights, tmp_path / "weights.pt")
    refused(*convert, words=("blocks.0.mlp.fc1.bias", "blocks.1.mlp.fc1.weight", "[3, 5]", "[256, 64]", "stranger"))


@pytest.mark.usefixtures("no_projection")
def test_a_model_that_cannot_be_exported(refused: Refused, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("data-dependent control flow\nand a long story")

    monkeypatch.setattr("torch.export.export", fail)
    refused("convert", *RANDOM, "--out", "o", words=("VisionTransformer", "data-dependent control flow"))


def test_folders_that_are_no_models_for_a_verb(refused: Refused, converted: Path, tmp_path: Path) -> None:
    for verb in ("convert", "inspect"):
        refused(verb, converted, words=("converted already", "densify"))
    (tmp_path / "empty").mkdir()
    for verb in (("convert",), ("inspect",), ("densify", "--out", "o"), ("evaluate", "--data", "digits")):
        refused(*verb, "empty", words=("empty", "config.json"))
    refused("evaluate", "empty", "--data", "digits", "--checkpoint", "empty/config.json", words=("--checkpoint names no file",))
    shutil.copytree(converted, tmp_path / "damaged")
    file = tmp_path / "damaged" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    for verb in (("densify", "--out", "o"), ("evaluate", "--data", "digits"), ("finetune", "--data", "digits", "--out", "o")):
        refused(*verb, "damaged", words=("model.safetensors is no safetensors file",))
