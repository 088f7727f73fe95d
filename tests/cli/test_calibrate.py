"""``convert --calibrate`` as a user runs it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from flysurgery.checkpoint import load
from tests.cli.conftest import TINY, Refused, Run


@pytest.fixture
def images(tmp_path: Path) -> Path:
    (tmp_path / "images").mkdir()
    pixels = np.random.default_rng(0)
    for index in range(12):
        Image.fromarray(pixels.integers(0, 255, (8, 8, 3), np.uint8)).resize((40, 40)).save(tmp_path / "images" / f"{index:02}.png")
    return tmp_path / "images"


def test_output_errors_stand_in_the_table_and_in_the_report(run: Run, images: Path) -> None:
    outcome = run("convert", *TINY, "--no-pretrained", "--calibrate", images, "--sequential", "--out", "o")
    assert outcome.code == 0, outcome.err
    assert "output error  plain projection" in outcome.out.splitlines()[0]
    assert f"calibrated with 12 samples of {images}, of which 2 were held out" in outcome.out
    report = json.loads(Path("o/report.json").read_text())
    rows = [row["calibration"] for row in report["rows"] if row["status"] == "replace"]
    assert all(0 < row["output_error"] < row["plain_output_error"] for row in rows)
    assert report["calibration"]["sequential"] is True
    load("o")


def test_unreadable_images_are_counted_and_named_on_stderr(run: Run, images: Path) -> None:
    (images / "03.png").write_text("broken")
    outcome = run("convert", *TINY, "--no-pretrained", "--calibrate", images, "--out", "o", "--json")
    assert outcome.code == 0 and outcome.err.count("\n") == 1
    assert f"1 images in {images} cannot be read and are left out: 03.png" in outcome.err
    assert json.loads(outcome.out)["calibration"]["skipped"] == ["03.png"]


def test_bad_calibration_is_refused_before_anything_is_written(refused: Refused, images: Path) -> None:
    convert = ("convert", *TINY, "--no-pretrained", "--out", "o")
    refused(*convert, "--samples", 20, words=("--samples", "--calibrate"), code=2)
    refused(*convert, "--sequential", words=("--sequential", "--calibrate"), code=2)
    refused(*convert, "--permute", words=("--permute", "--calibrate"), code=2)
    refused(*convert, "--calibrate", "nowhere", words=("there is no data set 'nowhere'",))
    refused(*convert, "--calibrate", images, "--samples", 13, words=("13 were asked for and there are 12",))
    refused(*convert, "--calibrate", images, "--samples", 1, words=("--samples",), code=2)
