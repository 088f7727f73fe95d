"""Photographs out of packages: which pictures are usable, where they are found, and which are near copies."""

from __future__ import annotations

import io
import runpy
import struct
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.recipes.conftest import RECIPES


@pytest.fixture
def rule(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(RECIPES))
    import photograph_rule

    return photograph_rule


def picture(seed: int, size: tuple[int, int] = (300, 240)) -> Image.Image:
    """Smooth noise in colour."""
    noise = np.random.default_rng(seed).integers(0, 256, (6, 8, 3), dtype=np.uint8)
    return Image.fromarray(noise).resize(size, Image.Resampling.BICUBIC)


def encoded(image: Image.Image, kind: str = "JPEG") -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind)
    return buffer.getvalue()


def test_what_is_usable(rule: Any) -> None:
    def found(path: str, image: Image.Image) -> list[Any]:
        return list(rule.pictures_in("p", path, encoded(image, "PNG")))

    (kept,) = found("a/b.png", picture(0, (2000, 1000)))
    assert (kept.name, kept.package) == ("p__a__b.jpg", "p")
    assert Image.open(io.BytesIO(kept.jpeg)).size == (1280, 640)
    assert found("a/b.png", picture(0, (300, 199))) == [], "too small"
    assert found("a/b.png", picture(0, (1000, 200))) == [], "a strip"
    assert found("a/screenshot-1.png", picture(0)) == []
    assert found("a/b.png", Image.new("RGB", (300, 300), (90, 10, 30))) == [], "flat"
    mask = Image.new("RGB", (300, 300))
    mask.paste((255, 255, 255), (0, 0, 150, 300))
    assert found("a/b.png", mask) == [], "two colours"
    assert list(rule.pictures_in("p", "a/b.png", b"no picture")) == []
    through = picture(0).convert("RGBA")
    through.putalpha(0)
    assert found("a/b.png", through) == [], "nothing but ground"


def test_pictures_within_a_file(rule: Any) -> None:
    parts = [encoded(picture(1, (200, 160))), encoded(picture(2, (200, 160)), "PNG")]
    content = b"qres" + b"".join(struct.pack(">I", len(part)) + part for part in parts)
    found = list(rule.pictures_in("p", "x/animals.rcc", content))
    assert [each.name for each in found] == ["p__animals-8.jpg", f"p__animals-{12 + len(parts[0])}.jpg"]
    assert list(rule.pictures_in("p", "x/paintings.rcc", content)) == [], "pieces of puzzles"
    (first,) = rule.pictures_in("p", "x/bike.pzl", b"puzzle" + parts[0] + parts[0])
    assert first.name == "p__bike-6.jpg"


def test_near_copies_are_left_out(rule: Any) -> None:
    def made(name: str, image: Image.Image) -> Any:
        return rule.Picture(name, "p", b"", rule.key_of(image))

    one, other, third = picture(1), picture(2), picture(3)
    brighter = Image.fromarray(np.clip(np.asarray(one).astype(int) + 9, 0, 255).astype(np.uint8))
    all_of_them = [made("a", one), made("a2", brighter), made("b", other), made("b2", other.resize((900, 720))), made("c", third)]
    fit, judge = rule.split(all_of_them, ["a"])
    assert [each.name for each in judge] == ["a"]
    assert [each.name for each in fit] == ["b", "c"], "the brighter one is too near to a judging one"


def test_a_quick_run_writes_both_folders(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with zipfile.ZipFile(tmp_path / "scikit_image-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("skimage/data/coffee.png", encoded(picture(1)))
        wheel.writestr("skimage/data/camera.png", encoded(picture(2)))
        wheel.writestr("skimage/other/camera2.png", encoded(picture(3)))
        wheel.writestr("scikit_image-1.0.dist-info/LICENSE.txt", "Files: *\nLicense: BSD-3-Clause\n")
    monkeypatch.syspath_prepend(str(RECIPES))
    out, sheet = tmp_path / "photographs", tmp_path / "sheet.png"
    arguments = [str(out), "--quick", "--packages", str(tmp_path), "--contact-sheet", str(sheet)]
    for _ in range(2):
        monkeypatch.setattr(sys, "argv", ["photographs.py", *arguments])
        runpy.run_path(str(RECIPES / "photographs.py"), run_name="__main__")
    assert [file.name for file in (out / "fit").iterdir()] == ["scikit-image__skimage__data__camera.jpg"]
    assert [file.name for file in (out / "judge").iterdir()] == ["scikit-image__skimage__data__coffee.jpg"]
    assert Image.open(sheet).width == 20 * 96
    assert "scikit-image                         1         1  BSD-3-Clause" in capsys.readouterr().out


def test_the_judging_ones_are_41() -> None:
    names = (RECIPES / "photographs_judge.txt").read_text().split()
    assert len(set(names)) == len(names) == 41
