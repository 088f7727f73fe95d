"""Photographs out of packages: which pictures are usable, where they are found, and which are near copies; and crops of them."""

from __future__ import annotations

import io
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from flysurgery.calibration import Samples
from tests.recipes.conftest import RECIPES


@pytest.fixture
def rule() -> Any:
    import photographs

    return photographs


def picture(seed: int, size: tuple[int, int] = (300, 240)) -> Image.Image:
    """Smooth noise in colour."""
    noise = np.random.default_rng(seed).integers(0, 256, (6, 8, 3), dtype=np.uint8)
    return Image.fromarray(noise).resize(size, Image.Resampling.BICUBIC)


def encoded(image: Image.Image, kind: str = "JPEG") -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind)
    return buffer.getvalue()


def test_what_is_usable(rule: Any) -> None:
    mask, through = Image.new("RGB", (300, 300)), picture(0).convert("RGBA")
    mask.paste((255, 255, 255), (0, 0, 150, 300))
    through.putalpha(0)

    def found(image: Image.Image, path: str = "a/b.png") -> list[Any]:
        return list(rule.pictures_in("p", path, encoded(image, "PNG")))

    (kept,) = found(picture(0, (2000, 1000)))
    assert (kept.name, kept.package, Image.open(io.BytesIO(kept.jpeg)).size) == ("p__a__b.jpg", "p", (1280, 640))
    too_small, strip, flat = picture(0, (300, 199)), picture(0, (1000, 200)), Image.new("RGB", (300, 300), (90, 10, 30))
    assert [found(image) for image in (too_small, strip, flat, mask, through)] == [[]] * 5
    assert found(picture(0), "a/screenshot-1.png") == list(rule.pictures_in("p", "a/b.png", b"no picture")) == []


def test_pictures_within_a_file(rule: Any) -> None:
    parts = [encoded(picture(1, (200, 160))), encoded(picture(2, (200, 160)), "PNG")]
    content = b"qres" + b"".join(struct.pack(">I", len(part)) + part for part in parts)
    assert [each.name for each in rule.pictures_in("p", "x/a.rcc", content)] == ["p__a-8.jpg", f"p__a-{12 + len(parts[0])}.jpg"]
    assert list(rule.pictures_in("p", "x/paintings.rcc", content)) == [], "pieces of puzzles"
    (first,) = rule.pictures_in("p", "x/bike.pzl", b"puzzle" + parts[0] + parts[0])
    assert first.name == "p__bike-6.jpg"


def test_near_copies_are_left_out(rule: Any) -> None:
    one, other, third = picture(1), picture(2), picture(3)
    brighter = Image.fromarray(np.clip(np.asarray(one).astype(int) + 9, 0, 255).astype(np.uint8))
    images = {"a": one, "a2": brighter, "b": other, "b2": other.resize((900, 720)), "c": third}
    fit, judge = rule.split([rule.Picture(name, "p", b"", rule.key_of(image)) for name, image in images.items()], ["a"])
    assert [each.name for each in judge] == ["a"]
    assert [each.name for each in fit] == ["b", "c"], "the brighter one is too near to a judging one"


def test_a_quick_run_writes_both_folders(run_program: Callable[..., None], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with zipfile.ZipFile(tmp_path / "scikit_image-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("skimage/data/coffee.png", encoded(picture(1)))
        wheel.writestr("skimage/data/camera.png", encoded(picture(2)))
        wheel.writestr("skimage/other/camera2.png", encoded(picture(3)))
        wheel.writestr("scikit_image-1.0.dist-info/LICENSE.txt", "Files: *\nLicense: BSD-3-Clause\n")
    for _ in range(2):
        run_program("photographs.py", "photographs", "--quick", "--packages", tmp_path)
    files = {part: [file.name for file in (tmp_path / "photographs" / part).iterdir()] for part in ("fit", "judge")}
    assert files["fit"] == ["scikit-image__skimage__data__camera.jpg"]
    assert files["judge"] == ["scikit-image__skimage__data__coffee.jpg"]
    assert "scikit-image                         1         1  BSD-3-Clause" in capsys.readouterr().out
    names = (RECIPES / "photographs_judge.txt").read_text().split()
    assert len(set(names)) == len(names) == 41


def test_held_out_samples_show_other_photographs() -> None:
    from photograph_crops import order

    for count, files in ((40, 10), (7, 2), (4, 3)):
        shown = order(count, files, seed=1)
        samples = Samples(torch.arange(count)[:, None].float())
        held, fitted = ({shown[int(each)] for each in torch.cat(list(part())).flatten()} for part in (samples.held_out, samples.fit))
        assert held and fitted and not held & fitted
    assert len(set(order(40, 10, seed=1))) == 10, "all are shown"
    assert order(40, 10, seed=1) != order(40, 10, seed=2)


def test_crops_are_of_their_photograph_and_normalized(tmp_path: Path) -> None:
    from photograph_crops import MEAN, STD, crops, judging_crops, photographs_in

    for number in range(8):
        Image.new("RGB", (50, 40), (255 * (number % 2), 0, 30 * number)).save(tmp_path / f"{number}.png")
    found = crops([tmp_path / "0.png", tmp_path / "1.png"], [1, 0, 1], seed=0)
    assert found.shape == (3, 3, 224, 224)
    shown = found * torch.tensor(STD).view(3, 1, 1) + torch.tensor(MEAN).view(3, 1, 1)
    assert [each.mean((1, 2)).round().tolist() for each in shown] == [[1, 0, 0], [0, 0, 0], [1, 0, 0]]
    many = photographs_in(tmp_path)
    assert [file.stem for file in many.judge] == ["3", "7"] and len(many.fit) == 6
    assert torch.equal(judging_crops(many, 2), judging_crops(many, 2)) and len(photographs_in(tmp_path, 1).judge) == 1
