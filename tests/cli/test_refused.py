"""Bad input, as a user gives it: one sentence, a non-zero exit code, and nothing written or changed; and weights that cannot be had."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from flysurgery import surgery
from flysurgery.cli.source import check_available
from flysurgery.errors import ModelError
from tests.cli.conftest import RANDOM, TINY, Refused, tiny_model

VIT_S = "vit_small_patch16_224"


@pytest.fixture
def no_projection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is refused in a test with this fixture is refused before the expensive work."""

    def too_late(*_: object, **__: object) -> None:
        raise AssertionError("the work began before the check")

    monkeypatch.setattr(surgery, "apply", too_late)


DIGITS = ("--calibrate", "digits", "--samples", 30)
MEASURE = ("--device", "cpu", "--measure")


MODELS: list[tuple[tuple[object, ...], int, tuple[str, ...]]] = [
    (("vit_smal_patch16_224",), 1, ("vit_smal_patch16_224", "nearest names", VIT_S)),
    (("vit_small_patch16_224.imagenet99",), 1, ("imagenet99", "vit_small_patch16_224.dino")),
    (("models/vit",), 1, ("no file or folder models/vit",)),
    (("weights.safetensors",), 1, ("no file or folder weights.safetensors",)),
    (("vit_pytorch:Transformator", "--no-pretrained"), 1, ("Transformator",)),
    (("vit_pytorch:ViT", "--no-pretrained"), 1, ("image_size",)),
    (("os:system", "--no-pretrained"), 1, ("vit_pytorch:CLASS", "os:system")),
    (("vit_pytorch:ViT",), 1, ("--checkpoint FILE", "--no-pretrained")),
    ((*TINY, "--checkpoint", "missing.pt"), 1, ("missing.pt",)),
    ((*TINY, "--base", VIT_S), 2, ("--base",)),
]


OPTIONS: list[tuple[tuple[object, ...], int, tuple[str, ...]]] = [
    (("--model-args", "deppth=3"), 1, ("deppth",)),
    (("--model-args", "depth"), 2, ("key=value", "'depth'")),
    (("--model-args", '{"depth": ' + 700 * "[" + 700 * "]" + "}"), 2, ("--model-args", "more than 32 levels")),
    (("--model-args", '{"depth": ' + 99999 * "[" + 99999 * "]" + "}"), 2, ("--model-args",)),
    (("--include", "no_such_layer"), 2, ("no_such_layer", "blocks.0")),
    (("--include", "(["), 2, ("regular expression", "([")),
    (("--roles", "fnn"), 2, ("fnn", "ffn")),
    (("--roles", " , "), 2, ("--roles",)),
    (("--rank", "3"), 2, ("rank", "monarch")),
    (("--include", "fc1", "--patterns", "(1,9,3,4),(4,3,5,1)"), 1, ("256x64", "36x20")),
    (("--patterns", "1,2,3"), 1, ("1,2,3",)),
    (("--patterns", "(1,2,3,4),(5,6,7,8)"), 1, ("12", "240")),
    (("--patterns", "(1,99999999,99999999,1)"), 1, ("99999999",)),
    (("--nblocks", "7"), 1, ("nothing would be replaced", "7")),
    (("--device", "abacus"), 2, ("'abacus'",)),
    (("--device", "cuda:99"), 2, ("'cuda:99'",)),
    (("--evaluate", "no/such/data"), 1, ("no/such/data",)),
    (("--samples", "20"), 2, ("samples needs data", "--calibrate")),
    (("--sequential", "--permute"), 2, ("sequential and permute need data", "--calibrate")),
    (("--calibrate", "nowhere"), 1, ("there is no data set 'nowhere'",)),
    (("--out", "model.safetensors"), 1, ("model.safetensors is the name of a file", "give a folder, such as", "/model")),
    (("--out", "."), 1, ("the folder that this runs in",)),
    (("--out", "", "--force"), 1, ("the folder that this runs in",)),
    (("--plot", "p.png"), 2, ("--budget, --fidelity or --measure",)),
    (("--per-layer", "qkv"), 2, ("--per-layer takes REGEX=CHOICE, as in 'qkv.v$=dense', got 'qkv'",)),
    (("--per-layer", "nothing=dense"), 2, ("'nothing' matches no selected layer",)),
    (("--fidelity", 0.9, "--calibrate", "digits", "--dry-run"), 2, ("--dry-run", "leave one out")),
    (("--fidelity", 0.9), 2, ("fidelity needs data to calibrate with", "--calibrate")),
    (("--fidelity", 0.9, "--calibrate", "digits", "--budget", 0.4), 2, ("leave budget and measure out",)),
    (("--budget", 0.4, "--nblocks", 8), 2, ("so nblocks cannot",)),
    (("--budget", 0.4, "--arch", "gonon"), 2, ("so arch cannot",)),
    (("--budget", "nan"), 2, ("budget", "nan")),
    (("--budget", 0.001), 2, ("smallest reachable share",)),
    (("--budget", 0.4, "--dry-run", "--plot", "p.png"), 2, ("--dry-run",)),
    (("--minutes", 1), 2, ("--minutes is the budget of --reconstruct",)),
    (("--reconstruct", "--minutes", 0, *DIGITS), 2, ("minutes must be a positive number",)),
    (("--batch", 2), 2, ("--batch", "--measure")),
    (("--optimize",), 2, ("--optimize", "--measure")),
    (("--measure", "--arch", "gonon"), 2, ("measure", "so arch cannot")),
    ((*MEASURE, "--nblocks", 8), 2, ("so nblocks cannot", "measure")),
]


@pytest.mark.usefixtures("no_projection")
@pytest.mark.parametrize(("arguments", "code", "words"), [*MODELS, *(((*RANDOM, *given), code, words) for given, code, words in OPTIONS)])
def test_convert_refuses(refused: Refused, arguments: tuple[object, ...], code: int, words: tuple[str, ...]) -> None:
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


def test_pictures_that_cannot_be_drawn_are_noticed_before_any_work(refused: Refused, monkeypatch: pytest.MonkeyPatch) -> None:
    plot = ("convert", *RANDOM, "--budget", 0.5, "--plot")
    Path("file").write_text("")
    Path("folder.png").mkdir()
    refused(*plot, "file/curve.png", words=("--plot cannot write file/curve.png", "Not a dir"), code=2)
    refused(*plot, "folder.png", words=("--plot takes a file, and folder.png is none",), code=2)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    refused(*plot, "curve.png", words=("matplotlib", "flysurgery[bench]"), code=2)


NAME = "vit_small_patch16_224"


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An address that refuses every connection, and an empty cache."""
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))


@pytest.mark.usefixtures("no_network")
def test_without_network_it_says_what_to_do_and_writes_nothing(refused: Refused) -> None:
    refused("convert", NAME, "--arch", "monarch", words=(NAME, "--checkpoint FILE", "--no-pretrained"))
    advice = ("someone/vit cannot be downloaded: no connection", "save_pretrained", "transformers:ViTModel --no-pretrained")
    refused("convert", "transformers:someone/vit", words=advice)


def test_it_says_so_within_seconds_and_without_the_client_s_retries(tmp_path: Path) -> None:
    """A process of its own, because the hub client reads its settings when it is imported."""
    environment = os.environ | {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path)}
    code = f"import sys; from flysurgery.cli import main; sys.exit(main(['evaluate', '{NAME}', '--data', 'digits']))"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=40, check=False)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1 and "--no-pretrained" in done.stderr, done.stderr


@pytest.mark.usefixtures("no_network")
def test_cached_weights_need_no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda repo, file: f"/{repo}/{file}")
    check_available(NAME)


def test_models_without_published_weights_are_named() -> None:
    name = "vit_small_patch16_36x1_224"
    with pytest.raises(ModelError, match=f"publishes no weights for {name}; .*--checkpoint FILE"):
        check_available(name)
