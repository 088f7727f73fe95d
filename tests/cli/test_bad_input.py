"""Bad input, as a user gives it: one sentence, a non-zero exit code, and nothing written or changed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch

from flysurgery import surgery
from flysurgery.checkpoint import build_base
from tests.cli.conftest import TINY, TINY_ARGUMENTS, TINY_BASE, Refused, Run, snapshot

SCRIPT = Path(sysconfig.get_path("scripts")) / "flysurgery"
VIT_S = "vit_small_patch16_224"


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
        ((*TINY, "--model-args", "deppth=3", "--no-pretrained"), 1, ("deppth",)),
        ((*TINY, "--model-args", "depth"), 2, ("key=value", "'depth'")),
        ((*TINY, "--model-args", '{"depth": ' + 700 * "[" + 700 * "]" + "}", "--no-pretrained"), 2, ("16 levels",)),
        ((*TINY, "--model-args", '{"depth": ' + 99999 * "[" + 99999 * "]" + "}", "--no-pretrained"), 2, ("--model-args",)),
        ((*TINY, "--no-pretrained", "--include", "no_such_layer"), 2, ("no_such_layer", "blocks.0")),
        ((*TINY, "--no-pretrained", "--include", "(["), 2, ("regular expression", "([")),
        ((*TINY, "--no-pretrained", "--roles", "fnn"), 2, ("fnn", "ffn")),
        ((*TINY, "--no-pretrained", "--roles", ","), 2, ("--roles",)),
        ((*TINY, "--no-pretrained", "--budget", "0"), 2, ("budget", "0")),
        ((*TINY, "--no-pretrained", "--budget", "1.5"), 2, ("budget", "1.5")),
        ((*TINY, "--no-pretrained", "--budget", "nan"), 2, ("budget", "nan")),
        ((*TINY, "--no-pretrained", "--rank", "3"), 2, ("rank", "monarch")),
        ((*TINY, "--no-pretrained", "--include", "fc1", "--patterns", "(1,9,3,4),(4,3,5,1)"), 1, ("256x64", "36x20")),
        ((*TINY, "--no-pretrained", "--patterns", "(1,9,3,4),(4,3,5,1)"), 2, ("256x64", "36x20")),
        ((*TINY, "--no-pretrained", "--patterns", "1,2,3"), 1, ("1,2,3",)),
        ((*TINY, "--no-pretrained", "--patterns", "(1,2,3,4),(5,6,7,8)"), 1, ("12", "240")),
        ((*TINY, "--no-pretrained", "--patterns", "(1,99999999,99999999,1)"), 1, ("99999999",)),
        ((*TINY, "--no-pretrained", "--nblocks", "7"), 1, ("nothing would be replaced", "7")),
        ((*TINY, "--no-pretrained", "--device", "abacus"), 2, ("abacus",)),
        ((*TINY, "--checkpoint", "missing.pt"), 1, ("missing.pt",)),
        ((*TINY, "--base", VIT_S), 2, ("--base",)),
        (("vit_pytorch:ViT",), 1, ("--checkpoint FILE", "--no-pretrained")),
        ((*TINY, "--no-pretrained", "--evaluate", "no/such/data"), 1, ("no/such/data",)),
    ],
)
def test_convert_refuses(refused: Refused, arguments: tuple[str, ...], code: int, words: tuple[str, ...]) -> None:
    refused("convert", *arguments, "--out", "made/here", words=words, code=code)


@pytest.fixture
def no_projection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is refused in a test with this fixture is refused before the expensive work."""

    def too_late(*_: object, **__: object) -> None:
        raise AssertionError("the work began before the check")

    monkeypatch.setattr(surgery, "apply", too_late)


@pytest.mark.usefixtures("no_projection")
def test_a_folder_that_exists_needs_force(refused: Refused, run: Run, tmp_path: Path, converted: Path) -> None:
    shutil.copytree(converted, tmp_path / "old")
    refused("convert", *TINY, "--no-pretrained", "--out", "old", words=("old", "--force"))
    refused("densify", converted, "--out", "old", words=("old", "--force"))


@pytest.mark.usefixtures("no_projection")
def test_force_replaces_no_stranger(refused: Refused, tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").write_bytes(b"miaow")
    for verb in (("convert", *TINY, "--no-pretrained"),):
        refused(*verb, "--out", "photos", "--force", words=("photos", "no flysurgery checkpoint"))
    refused("convert", *TINY, "--no-pretrained", "--out", "photos/cat.jpg", "--force", words=("cat.jpg", "is a file"))
    refused("convert", *TINY, "--no-pretrained", "--out", "photos/cat.jpg/deeper", words=("photos/cat.jpg/deeper", "Not a directory"))


@pytest.mark.usefixtures("no_projection")
@pytest.mark.skipif(sys.platform != "linux", reason="needs a folder in which not even root may write")
def test_no_permission(refused: Refused) -> None:
    refused("convert", *TINY, "--no-pretrained", "--out", "/sys/made", words=("/sys/made", "not permitted"))


@pytest.mark.usefixtures("no_projection")
def test_no_space(refused: Refused, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage("/")._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    refused("convert", *TINY, "--no-pretrained", "--out", "o", words=("MB", "0.0 MB left"))


def test_no_space_in_the_middle_of_writing_leaves_nothing(refused: Refused, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(sys.modules["flysurgery.checkpoint.save"], "save_file", full)
    refused("convert", *TINY, "--no-pretrained", "--out", "made/here", words=("made/here", "No space left on device"))


@pytest.fixture
def weights(tmp_path: Path) -> dict[str, torch.Tensor]:
    """The tensors of the tiny model."""
    torch.manual_seed(0)
    return dict(build_base(TINY_BASE, TINY_ARGUMENTS).state_dict())


@pytest.mark.usefixtures("no_projection")
def test_a_checkpoint_that_does_not_fit_names_its_tensors(refused: Refused, tmp_path: Path, weights: dict[str, torch.Tensor]) -> None:
    del weights["blocks.0.mlp.fc1.bias"]
    weights["blocks.1.mlp.fc1.weight"] = torch.zeros(3, 5)
    weights["stranger"] = torch.zeros(1)
    torch.save(weights, tmp_path / "weights.pt")
    words = ("blocks.0.mlp.fc1.bias", "blocks.1.mlp.fc1.weight", "[3, 5]", "[256, 64]", "stranger")
    refused("convert", *TINY, "--checkpoint", "weights.pt", "--out", "o", words=words)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_no_numbers_name_the_layer(
    refused: Refused, tmp_path: Path, weights: dict[str, torch.Tensor], value: float
) -> None:
    weights["blocks.1.mlp.fc2.weight"][2, 3] = value
    torch.save(weights, tmp_path / "weights.pt")
    refused("convert", *TINY, "--checkpoint", "weights.pt", "--out", "o", words=("blocks.1.mlp.fc2",))


class Command:
    """What a pickle may hold besides tensors."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (os.mkdir, ("hacked",))


@pytest.mark.usefixtures("no_projection")
def test_a_checkpoint_with_python_objects_is_not_run(refused: Refused, tmp_path: Path) -> None:
    torch.save({"weights": Command()}, tmp_path / "weights.pt")
    refused("convert", *TINY, "--checkpoint", "weights.pt", "--out", "o", words=("weights.pt", "never unpickled"))


@pytest.mark.usefixtures("no_projection")
def test_a_model_that_cannot_be_exported(refused: Refused, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("data-dependent control flow\nand a long story")

    monkeypatch.setattr("torch.export.export", fail)
    refused("convert", *TINY, "--no-pretrained", "--out", "o", words=("VisionTransformer", "data-dependent control flow"))


@pytest.mark.usefixtures("no_projection")
def test_a_model_that_is_converted_already(refused: Refused, converted: Path) -> None:
    refused("convert", converted, "--out", "o", words=("converted already", "densify"))
    refused("inspect", converted, words=("converted already", "densify"))


@pytest.mark.usefixtures("no_projection")
def test_folders_that_are_no_models(refused: Refused, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "nonsense").mkdir()
    (tmp_path / "nonsense" / "config.json").write_text("{")
    for verb in ("convert", "inspect"):
        refused(verb, "empty", words=("empty", "config.json"))
        refused(verb, "nonsense", words=("nonsense", "JSON"))
    refused("densify", "empty", "--out", "o", words=("empty",))
    refused("evaluate", "empty", "--data", "digits", words=("empty",))
    refused("evaluate", "empty", "--data", "digits", "--checkpoint", "empty/config.json", words=("--checkpoint names no file",))


def test_as_a_process_of_its_own(tmp_path: Path) -> None:
    """The whole way once: the installed command, its streams, its exit code."""
    command = [SCRIPT, "convert", *TINY, "--no-pretrained", "--include", "no_such_layer"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("flysurgery: ") and done.stderr.count("\n") == 1, done.stderr
    assert snapshot(tmp_path) == {}


@pytest.mark.parametrize("out", [".", "", ".."])
def test_the_folder_that_the_command_runs_in_is_no_place_for_a_model(out: str, refused: Refused) -> None:
    for more in ((), ("--force",)):
        refused("convert", *TINY, "--no-pretrained", "--out", out, *more, words=("the folder that this runs in",))
