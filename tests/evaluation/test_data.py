"""Images to evaluate on and to calibrate with: prepared for the model's input, kept apart, and refused where they cannot belong to it."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader
from vit_pytorch import ViT

from flysurgery.checkpoint import build_base
from flysurgery.errors import DataError, WalkError
from flysurgery.evaluation import Fractals, ImageData, digits, evaluate, load_calibration, load_data

DATA = importlib.import_module("flysurgery.evaluation.data")

SMALL: dict[str, Any] = {"img_size": 16, "patch_size": 8, "embed_dim": 32, "depth": 1, "num_heads": 2}

COLOURS = {"blue": (0, 0, 255), "green": (0, 255, 0), "red": (255, 0, 0)}


def model(num_classes: int, **changes: Any) -> nn.Module:
    return timm.create_model("vit_tiny_patch16_224", num_classes=num_classes, **{**SMALL, **changes})


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """Two pictures of each colour, larger than the model's input and not square."""
    for name, colour in COLOURS.items():
        (tmp_path / "pictures" / name).mkdir(parents=True)
        for index in range(2):
            Image.fromarray(np.full((40, 30, 3), colour, np.uint8)).save(tmp_path / "pictures" / name / f"{index}.png")
    return tmp_path / "pictures"


def test_digits_are_split_into_parts_that_are_disjoint_complete_and_fixed() -> None:
    parts = [digits(part, (8, 8), mean=(0.5,), std=(0.25,)) for part in ("train", "held-out")]
    assert [len(part) for part in parts] == [1198, 599]
    restored = ((torch.cat([part.tensors[0] for part in parts]) * 0.25 + 0.5) * 16).flatten(1)
    whole = torch.tensor(load_digits().images, dtype=torch.float32).flatten(1)
    assert torch.equal(torch.unique(restored, dim=0), torch.unique(whole, dim=0)) and torch.equal(restored.sum(0), whole.sum(0))
    assert sorted(torch.cat([part.tensors[1] for part in parts]).tolist()) == sorted(load_digits().target.tolist())
    torch.manual_seed(99)
    again = digits("held-out", (8, 8), mean=(0.5,), std=(0.25,))
    assert torch.equal(again.tensors[0], parts[1].tensors[0]), "the model card's accuracy is that of these very images"
    assert again.tensors[1][:10].tolist() == [2, 8, 2, 6, 6, 7, 1, 9, 8, 5]


def test_digits_have_the_models_size_channels_and_normalization() -> None:
    grey = load_data("digits", model(10, in_chans=1))
    assert (grey.samples, grey.num_classes, grey.dataset[0][0].shape) == (599, 10, (1, 16, 16))
    other = model(10)
    assert torch.equal(load_data("digits", other).dataset[0][0][1], grey.dataset[0][0][0]), "0.5 and 0.5 in each channel"
    other.pretrained_cfg = {**other.pretrained_cfg, "mean": (0.0, 0.5, 1.0), "std": (1.0, 1.0, 2.0)}
    image = load_data("digits", other).dataset[0][0]
    assert image.shape == (3, 16, 16) and image[0].min() >= 0 and image[0].max() <= 1
    assert torch.equal(image[1], image[0] - 0.5) and torch.equal(image[2], (image[0] - 1) / 2)


def test_digits_without_scikit_learn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(DataError, match=r"pip install 'flysurgery\[train\]'"):
        digits("train", (8, 8), mean=(0.5,), std=(0.25,))


def test_models_on_meta_and_of_vit_pytorch() -> None:
    with torch.device("meta"):
        skeleton = model(10)
    assert load_data("digits", skeleton).dataset[0][0].shape == (3, 16, 16)
    vit = ViT(image_size=32, patch_size=8, num_classes=10, dim=32, depth=1, heads=2, mlp_dim=64)
    assert load_data("digits", vit).dataset[0][0].shape == (3, 32, 32)


def test_image_folder(pictures: Path) -> None:
    data = load_data(pictures, model(3))
    assert (data.samples, data.num_classes, data.workers) == (6, 3, 0)
    for index, (image, label) in enumerate(data.dataset[i] for i in range(6)):
        colour = torch.tensor(list(COLOURS.values())[index // 2]) / 255
        assert label == index // 2
        assert torch.equal(image, ((colour - 0.5) / 0.5)[:, None, None].expand(3, 16, 16))
    assert load_data(pictures, model(3, in_chans=1)).dataset[0][0].shape == (1, 16, 16), "a grey model reads grey pictures"


@pytest.mark.parametrize(
    ("name", "classes", "fact"),
    [
        ("digits", 1000, "digits has 10 classes and the model tells 1000 apart"),
        ("digits", 0, "digits has 10 classes and the model tells 0 apart"),
        ("pictures", 4, "has 3 classes and the model tells 4 apart"),
        ("nowhere", 10, "no data set 'nowhere': expected 'digits', 'fractals' or a folder"),
        ("", 10, "one folder of images for each class"),
        ("no", 10, "no image folder"),
        ("no/pictures", 10, "no image folder"),
    ],
)
def test_data_that_do_not_fit(name: str, classes: int, fact: str, pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "no" / "pictures").mkdir(parents=True)
    (tmp_path / "no" / "pictures" / "notes.txt").write_text("x")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=fact) as caught:
        load_data(name, model(classes))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("workers", [0, 1])
def test_pictures_that_are_damaged_or_too_large(workers: int, pictures: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (pictures / "green" / "1.png").write_bytes((pictures / "green" / "1.png").read_bytes()[:40])
    data = load_data(pictures, model(3))
    monkeypatch.setattr(ImageData, "workers", workers)
    exceeds = r"png cannot be read as an image: Image size .* exceeds limit"
    for pixels, fact in ((10**6, r"^\S*green/1\.png cannot be read as an image: "), (4, exceeds)):
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", pixels)
        with pytest.raises(DataError, match=fact) as caught:
            evaluate(model(3), data)
        assert "\n" not in str(caught.value)


def test_models_of_something_else_than_images(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing_known(model: nn.Module) -> torch.Tensor:
        raise WalkError("no example input is known")

    monkeypatch.setattr(DATA, "example_input", nothing_known)
    with pytest.raises(DataError, match="it is not known what images the model takes: no example input is known"):
        load_data("digits", model(10))
    for shape in ((2, 3, 4, 16, 16), (2, 5, 16, 16), (2, 77)):
        monkeypatch.setattr(DATA, "example_input", lambda model, shape=shape: torch.zeros(shape))
        with pytest.raises(DataError, match="expected a model of images with 1 or 3 channels, got one that takes inputs of shape"):
            load_data("digits", model(10))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Ten grey images, from dark to bright, at two depths and of two sizes."""
    for index in range(10):
        place = tmp_path / "images" / ("a" if index < 5 else "b/c")
        place.mkdir(parents=True, exist_ok=True)
        pixels = np.full((20 + index, 40, 3), 25 * index, np.uint8)
        pixels[:, 20:] += 9
        Image.fromarray(pixels).save(place / f"{index}.png")
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
        ("dogs", None, "there is no data set 'dogs': expected 'digits', 'fractals' or a folder of images"),
        ("blank", None, "all 3 images are of one colour each"),
        ("digits", 1500, "1500 were asked for and there are 1198"),
    ],
)
def test_nothing_to_read_is_refused(
    name: str, samples: int | None, words: str, tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name_of_folder in ("empty", "blank"):
        (tmp_path / name_of_folder).mkdir()
    for grey in (0, 99, 255):
        Image.new("RGB", (20, 30), (grey, grey, 9)).save(tmp_path / "blank" / f"{grey}.png")
    for path in folder.rglob("*.png"):
        path.write_text("broken")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=words):
        load_calibration(name, model(10), samples=samples)


GREY = {"mean": [0.5], "std": [0.5]}


def test_a_picture_follows_from_its_number_alone() -> None:
    data = Fractals("train", 5, (24, 32), **GREY)
    images, classes = data.batch([7, 100_000, 8])
    again, same = data.batch([8, 7])
    assert images.shape == (3, 1, 24, 32) and images.min() >= -1 and images.max() <= 1
    assert torch.equal(images[[2, 0]], again) and torch.equal(classes[[2, 0]], same)
    other = Fractals("train", 5, (24, 32), **GREY, seed=1).batch([7, 100_000, 8])[0]
    assert not any(torch.equal(one, two) for one in images for two in other)


def test_held_out_pictures_are_no_training_pictures_and_their_classes_take_turns() -> None:
    held_out, train = (Fractals(part, 4, (16, 16), **GREY, samples=40) for part in ("held-out", "train"))
    images, classes = next(iter(DataLoader(held_out, 40)))
    assert classes.tolist() == [number % 4 for number in range(40)]
    seen = {image.numpy().tobytes() for image in train.batch(range(400))[0]}
    assert len(seen) == 400 and not seen & {image.numpy().tobytes() for image in images}
    counts = train.batch(range(400))[1].bincount(minlength=4)
    assert counts.min() > 70, "random classes, each about 100 times"


def test_classes_can_be_told_apart_by_the_nearest_training_picture() -> None:
    """In grey of no certain brightness and on any background, so edges are compared. Guessing gives 0.25."""

    def edges(images: torch.Tensor) -> torch.Tensor:
        steps = (images[:, :, 1:, 1:] - images[:, :, :-1, 1:]).abs() + (images[:, :, 1:, 1:] - images[:, :, 1:, :-1]).abs()
        flat = torch.nn.functional.avg_pool2d(steps, 5, 2).flatten(1)
        return torch.nn.functional.normalize(flat, dim=1)

    known, classes = Fractals("train", 4, (32, 32), **GREY).batch(range(600))
    asked, expected = Fractals("held-out", 4, (32, 32), **GREY).batch(range(100))
    nearest = (edges(asked) @ edges(known).T).argmax(1)
    assert (classes[nearest] == expected).float().mean() > 0.7


def test_load_data_makes_them_for_the_model() -> None:
    arguments = {"img_size": 16, "patch_size": 8, "embed_dim": 16, "depth": 1, "num_heads": 2, "num_classes": 3}
    model = build_base("vit_tiny_patch16_224", arguments).eval()
    data = load_data("fractals", model)
    assert (data.samples, data.num_classes, data.workers) == (150, 3, 0)
    assert evaluate(model, data).samples == 150
    with pytest.raises(DataError, match="at least 2 classes"):
        load_data("fractals", build_base("vit_tiny_patch16_224", arguments | {"num_classes": 1}))
