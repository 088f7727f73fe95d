"""Calibration images: prepared as for the model, none that accuracy is measured on, the unreadable left out and named."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from flysurgery.errors import DataError
from flysurgery.evaluation import load_calibration, load_data
from tests.evaluation.test_data import model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Ten grey images, from dark to bright, at two depths and of two sizes."""
    for index in range(10):
        place = tmp_path / "images" / ("a" if index < 5 else "b/c")
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((20 + index, 40, 3), 25 * index, np.uint8)).save(place / f"{index}.png")
    (tmp_path / "images" / "notes.txt").write_text("no image")
    return tmp_path / "images"


def test_digits_to_calibrate_with_are_not_those_that_are_measured_on() -> None:
    network = model(10)
    found = load_calibration("digits", network, samples=300)
    assert found.inputs.shape == (300, 3, 16, 16)
    held_out = {image.numpy().tobytes() for image, _ in load_data("digits", network).dataset}  # pyright: ignore[reportGeneralTypeIssues]
    assert held_out.isdisjoint(image.numpy().tobytes() for image in found.inputs)


def test_a_folder_of_any_depth_without_regard_to_classes_gives_samples_that_are_spread_evenly(folder: Path) -> None:
    found = load_calibration(folder, model(7))
    assert found.inputs.shape == (10, 3, 16, 16) and found.skipped == ()
    assert found.inputs.mean((1, 2, 3)).diff().min() > 0
    assert torch.equal(load_calibration(folder, model(7), samples=5).inputs, found.inputs[::2])


def test_unreadable_images_are_left_out_named_and_made_up_for(folder: Path) -> None:
    (folder / "a" / "0.png").write_text("broken")
    (folder / "b" / "c" / "6.png").write_bytes((folder / "b" / "c" / "6.png").read_bytes()[:40])
    found = load_calibration(folder, model(7), samples=5)
    assert len(found) == 5 and found.skipped == ("a/0.png", "b/c/6.png")
    with pytest.raises(DataError, match=r"9 samples are needed, and only 8 images can be read; unreadable are a/0\.png, b/c/6\.png$"):
        load_calibration(folder, model(7), samples=9)


@pytest.mark.parametrize(
    ("name", "samples", "words"),
    [
        ("empty", None, "there are no images in"),
        ("images", None, "none of the 10 images"),
        ("dogs", None, "there is no data set 'dogs'"),
        ("digits", 1500, "1500 were asked for and there are 1198"),
    ],
)
def test_nothing_to_read_is_refused(
    name: str, samples: int | None, words: str, tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "empty").mkdir()
    for path in folder.rglob("*.png"):
        path.write_text("broken")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=words):
        load_calibration(name, model(10), samples=samples)
