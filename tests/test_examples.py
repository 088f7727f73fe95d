"""Every script of ``examples`` runs, with a small model of random weights and a few images."""

import runpy
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import flysurgery

FOLDER = Path(__file__).parents[1] / "examples"

RUNS = {
    "deploy_timm": (("--photographs", "images"), "classes of the first photographs", "checkpoints/deployed"),
    "transformers_model": ((), "scores differ by 0.0e+00", "checkpoints/transformers_model"),
    "own_data": (("--data", "images", "--epochs", "1", "--batch", "4"), "converted: top-1", "checkpoints/own_data"),
    "lora": (("--data", "images", "--epochs", "1"), "epoch 0: top-1", "checkpoints/lora/base"),
    "onnx_export": ((), "of dense", None),
}


@pytest.fixture
def images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twelve images in two classes, in the folder in which the test runs."""
    monkeypatch.chdir(tmp_path)
    pixels = np.random.default_rng(0)
    for index in range(12):
        folder = tmp_path / "images" / ("cat", "dog")[index % 2]
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels.integers(0, 255, (40, 40, 3), np.uint8)).save(folder / f"{index}.png")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("images")
@pytest.mark.parametrize("name", [path.stem for path in FOLDER.glob("*.py")])
def test_it_runs(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    if name == "onnx_export":
        pytest.importorskip("onnx")
        pytest.importorskip("onnxruntime")
    options, said, saved = RUNS[name]
    monkeypatch.setattr(sys, "argv", [name, "--tiny", *options])
    runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")
    assert said in capsys.readouterr().out
    if saved is not None:
        assert flysurgery.load(saved) is not None
    assert len((FOLDER / f"{name}.py").read_text(encoding="utf-8").splitlines()) <= 60
