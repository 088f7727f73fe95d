"""Bad input, as a user gives it: one sentence, a non-zero exit code, and nothing written or changed; and weights that cannot be had."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from flysurgery import surgery
from flysurgery.cli.source import check_available
from flysurgery.errors import ModelError
from tests.cli.conftest import RANDOM, TINY, Refused

VIT_S = "vit_small_patch16_224"


@pytest.fixture
def no_projection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is refused in a test with this fixture is refused before the expensive work."""

    def too_late(*_: object, **__: object) -> None:
        raise AssertionError("the work began before the check")

    monkeypatch.setattr(surgery, "apply", too_late)


MODELS: list[tuple[tuple[object, ...], int, tuple[str, ...]]] = [
    (("vit_smal_patch16_224",), 1, ("vit_smal_patch16_224", "nearest names", VIT_S)),
    (("models/vit",), 1, ("no file or folder models/vit",)),
    (("weights.safetensors",), 1, ("no file or folder weights.safetensors",)),
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
    (("--roles", " , "), 2, ("--roles",)),
    (("--patterns", "1,2,3"), 1, ("1,2,3",)),
    (("--nblocks", "7"), 1, ("nothing would be replaced", "7")),
    (("--device", "abacus"), 2, ("'abacus'",)),
    (("--device", "cuda:99"), 2, ("'cuda:99'",)),
    (("--evaluate", "no/such/data"), 1, ("no/such/data",)),
    (("--samples", "20"), 2, ("samples needs data", "--calibrate")),
    (("--sequential", "--permute"), 2, ("sequential and permute need data", "--calibrate")),
    (("--calibrate", "nowhere"), 1, ("there is no data set 'nowhere'",)),
    (("--out", "model.safetensors"), 1, ("model.safetensors is the name of a file", "give a folder, such as", "/model")),
    (("--out", "", "--force"), 1, ("the folder that this runs in",)),
    (("--plot", "p.png"), 2, ("--budget, --fidelity or --measure",)),
    (("--per-layer", "qkv"), 2, ("--per-layer takes REGEX=CHOICE, as in 'qkv.v$=dense', got 'qkv'",)),
    (("--fidelity", 0.9, "--calibrate", "digits", "--dry-run"), 2, ("--dry-run", "leave one out")),
    (("--fidelity", 0.9), 2, ("fidelity needs data to calibrate with", "--calibrate")),
    (("--budget", 0.4, "--arch", "gonon"), 2, ("so arch cannot",)),
    (("--budget", 0.4, "--dry-run", "--plot", "p.png"), 2, ("--dry-run",)),
    (("--minutes", 1), 2, ("--minutes is the budget of --reconstruct",)),
    (("--reconstruct", "--minutes", 0, "--calibrate", "digits", "--samples", 30), 2, ("minutes must be a positive number",)),
    (("--batch", 2), 2, ("--batch", "--measure")),
    (("--optimize",), 2, ("--optimize", "--measure")),
    (("--device", "cpu", "--measure", "--nblocks", 8), 2, ("so nblocks cannot", "measure")),
]


@pytest.mark.usefixtures("no_projection")
@pytest.mark.parametrize(("arguments", "code", "words"), [*MODELS, *(((*RANDOM, *given), code, words) for given, code, words in OPTIONS)])
def test_convert_refuses(refused: Refused, arguments: tuple[object, ...], code: int, words: tuple[str, ...]) -> None:
    refused("convert", "--out", "made/here", *arguments, words=words, code=code)


@pytest.mark.usefixtures("no_projection")
def test_folders_and_pictures_that_cannot_be_written(refused: Refused, converted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(converted, "old")
    for verb in (("convert", *RANDOM), ("densify", converted)):
        refused(*verb, "--out", "old", words=("old", "--force"))
    Path("photos").mkdir()
    Path("photos/cat.jpg").write_bytes(b"miaow")
    refused("convert", *RANDOM, "--force", "--out", "photos", words=("photos", "no flysurgery checkpoint"))
    if sys.platform == "linux":  # a folder in which not even root may write
        refused("convert", *RANDOM, "--out", "/sys/made", words=("/sys/made could not be written", "in /sys"))
    plot = ("convert", *RANDOM, "--budget", 0.5, "--plot")
    refused(*plot, "photos/cat.jpg/curve.png", words=("--plot cannot write photos/cat.jpg/curve.png", "Not a dir"), code=2)
    Path("folder.png").mkdir()
    refused(*plot, "folder.png", words=("--plot takes a file, and folder.png is none",), code=2)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    refused(*plot, "curve.png", words=("matplotlib", "flysurgery[bench]"), code=2)


def test_folders_that_are_no_models_for_a_verb(refused: Refused, converted: Path, tmp_path: Path) -> None:
    refused("convert", *RANDOM, "--arch", "kaleidoscope", "--out", "p", words=("layer blocks.0.attn.qkv", "--init random"))
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


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An address that refuses every connection, and an empty cache."""
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))


@pytest.mark.usefixtures("no_network")
def test_without_network_it_says_what_to_do_and_writes_nothing(refused: Refused) -> None:
    refused("convert", VIT_S, "--arch", "monarch", words=(VIT_S, "--checkpoint FILE", "--no-pretrained"))
    advice = ("someone/vit cannot be downloaded: no connection", "save_pretrained", "transformers:ViTModel --no-pretrained")
    refused("convert", "transformers:someone/vit", words=advice)


def test_it_says_so_within_seconds_and_without_the_client_s_retries(tmp_path: Path) -> None:
    """A process of its own, because the hub client reads its settings when it is imported."""
    environment = os.environ | {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path)}
    code = f"import sys; from flysurgery.cli import main; sys.exit(main(['evaluate', '{VIT_S}', '--data', 'digits']))"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=40, check=False)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1 and "--no-pretrained" in done.stderr, done.stderr


@pytest.mark.usefixtures("no_network")
def test_cached_weights_need_no_network_and_models_without_published_weights_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda repo, file: f"/{repo}/{file}")
    check_available(VIT_S)
    name = "vit_small_patch16_36x1_224"
    with pytest.raises(ModelError, match=f"publishes no weights for {name}; .*--checkpoint FILE"):
        check_available(name)
