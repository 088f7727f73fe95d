"""Images to evaluate on and to calibrate with: prepared for the model's input, kept apart, and refused where they cannot belong to it."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader
from vit_pytorch import ViT

from flysurgery.errors import DataError, WalkError
from flysurgery.evaluation import Fractals, ImageData, digits, evaluate, load_calibration, load_data
from tests.support.models import vit

COLOURS = {"blue": (0, 0, 255), "green": (0, 255, 0), "red": (255, 0, 0)}


def model(num_classes: int, **changes: Any) -> nn.Module:
    return vit(num_classes=num_classes, **changes).train()


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """Two pictures of each colour, larger than the model's input and not square."""
    for name, colour in COLOURS.items():
        (tmp_path / "pictures" / name).mkdir(parents=True)
        for index in range(2):
            Image.fromarray(np.full((40, 30, 3), colour, np.uint8)).save(tmp_path / "pictures" / name / f"{index}.png")
    return tmp_path / "pictures"


def bytes_of(images: Any) -> set[bytes]:
    return {image.numpy().tobytes() for image in images}


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
    with torch.device("meta"):
        skeleton = model(10)
    vit = ViT(image_size=32, patch_size=8, num_classes=10, dim=32, depth=1, heads=2, mlp_dim=64)
    assert [load_data("digits", each).dataset[0][0].shape for each in (skeleton, vit)] == [(3, 16, 16), (3, 32, 32)]
    calibration = load_calibration("digits", other, samples=300).inputs
    assert calibration.shape == (300, 3, 16, 16)
    assert bytes_of(calibration).isdisjoint(bytes_of(image for image, _ in load_data("digits", other).dataset)), "measured on others"


def test_image_folder(pictures: Path) -> None:
    data = load_data(pictures, model(3))
    assert (data.samples, data.num_classes, data.workers) == (6, 3, 0)
    for index, (image, label) in enumerate(data.dataset[i] for i in range(6)):
        colour = torch.tensor(list(COLOURS.values())[index // 2]) / 255
        assert label == index // 2
        assert torch.equal(image, ((colour - 0.5) / 0.5)[:, None, None].expand(3, 16, 16))
    assert load_data(pictures, model(3, in_chans=1)).dataset[0][0].shape == (1, 16, 16), "a grey model reads grey pictures"


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


def test_a_folder_of_any_depth_gives_samples_that_are_spread_evenly_and_what_is_unreadable_is_made_up_for(tmp_path: Path) -> None:
    for index in range(10):  # from dark to bright
        place = tmp_path / ("a" if index < 5 else "b/c")
        place.mkdir(parents=True, exist_ok=True)
        pixels = np.full((20 + index, 40, 3), 25 * index, np.uint8)
        pixels[:, 20:] += 9
        Image.fromarray(pixels).save(place / f"{index}.png")
    (tmp_path / "notes.txt").write_text("no image")
    found = load_calibration(tmp_path, model(7))
    assert found.inputs.shape == (10, 3, 16, 16) and found.skipped == ()
    assert found.inputs.mean((1, 2, 3)).diff().min() > 0
    assert torch.equal(load_calibration(tmp_path, model(7), samples=5).inputs, found.inputs[::2])
    (tmp_path / "a" / "0.png").write_text("broken")
    (tmp_path / "b" / "c" / "6.png").write_bytes((tmp_path / "b" / "c" / "6.png").read_bytes()[:40])
    found = load_calibration(tmp_path, model(7), samples=5)
    assert len(found) == 5 and found.skipped == ("a/0.png", "b/c/6.png")
    with pytest.raises(DataError, match=r"9 samples are needed, and only 8 images can be read; unreadable are a/0\.png, b/c/6\.png$"):
        load_calibration(tmp_path, model(7), samples=9)


@pytest.mark.parametrize(
    ("load", "name", "classes", "fact"),
    [
        (load_data, "digits", 1000, "digits has 10 classes and the model tells 1000 apart"),
        (load_data, "pictures", 4, "has 3 classes and the model tells 4 apart"),
        (load_data, "nowhere", 10, "no data set 'nowhere': expected 'digits', 'fractals' or a folder"),
        (load_data, "no", 10, "no image folder"),
        (load_data, "fractals", 1, "at least 2 classes"),
        (load_calibration, "no", 10, "there are no images in"),
        (load_calibration, "broken", 10, "none of the 3 images"),
        (load_calibration, "dogs", 10, "there is no data set 'dogs': expected 'digits', 'fractals' or a folder of images"),
        (load_calibration, "blank", 10, "all 3 images are of one colour each"),
        (lambda name, model: load_calibration(name, model, samples=1500), "digits", 10, "1500 were asked for and there are 1198"),
    ],
)
def test_data_that_do_not_fit_or_cannot_be_read(
    load: Any, name: str, classes: int, fact: str, pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for made in ("no/pictures", "blank", "broken"):
        (tmp_path / made).mkdir(parents=True)
    (tmp_path / "no" / "pictures" / "notes.txt").write_text("x")
    for grey in (0, 99, 255):
        Image.new("RGB", (20, 30), (grey, grey, 9)).save(tmp_path / "blank" / f"{grey}.png")
        (tmp_path / "broken" / f"{grey}.png").write_text("broken")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=fact) as caught:
        load(name, model(classes))
    assert "\n" not in str(caught.value)


def test_models_of_something_else_than_images_and_digits_without_scikit_learn(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing_known(model: nn.Module) -> Tensor:
        raise WalkError("no example input is known")

    example_input = "flysurgery.evaluation.data.example_input"
    monkeypatch.setattr(example_input, nothing_known)
    with pytest.raises(DataError, match="it is not known what images the model takes: no example input is known"):
        load_data("digits", model(10))
    for shape in ((2, 3, 4, 16, 16), (2, 5, 16, 16), (2, 77)):
        monkeypatch.setattr(example_input, lambda model, shape=shape: torch.zeros(shape))
        with pytest.raises(DataError, match="expected a model of images with 1 or 3 channels, got one that takes inputs of shape"):
            load_data("digits", model(10))
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(DataError, match=r"pip install 'flysurgery\[train\]'"):
        digits("train", (8, 8), mean=(0.5,), std=(0.25,))


GREY = {"mean": [0.5], "std": [0.5]}


@pytest.mark.gpu
def test_no_batch_of_fractals_waits_for_the_device() -> None:
    data = Fractals("train", 5, (24, 32), **GREY, device="cuda")
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        images, _ = data.batch(range(8))
    finally:
        torch.cuda.set_sync_debug_mode(before)
    assert images.shape == (8, 1, 24, 32)


def test_a_fractal_follows_from_its_number_alone_and_held_out_ones_are_no_training_pictures() -> None:
    data = Fractals("train", 5, (24, 32), **GREY)
    images, classes = data.batch([7, 100_000, 8])
    again, same = data.batch([8, 7])
    assert images.shape == (3, 1, 24, 32) and images.min() >= -1 and images.max() <= 1
    assert torch.equal(images[[2, 0]], again) and torch.equal(classes[[2, 0]], same)
    assert torch.equal(data.batch(range(8, 6, -1))[0], again)
    other = Fractals("train", 5, (24, 32), **GREY, seed=1).batch([7, 100_000, 8])[0]
    assert not any(torch.equal(one, two) for one in images for two in other)
    held_out, train = (Fractals(part, 4, (16, 16), **GREY, samples=40) for part in ("held-out", "train"))
    images, classes = next(iter(DataLoader(held_out, 40)))
    assert classes.tolist() == [number % 4 for number in range(40)], "they take turns"
    drawn, classes = train.batch(range(400))
    assert len(bytes_of(drawn)) == 400 and bytes_of(drawn).isdisjoint(bytes_of(images))
    assert classes.bincount(minlength=4).min() > 70, "random classes, each about 100 times"
    network = model(3)
    data = load_data("fractals", network)
    assert (data.samples, data.num_classes, data.workers, evaluate(network, data).samples) == (150, 3, 0, 150)


def test_classes_can_be_told_apart_by_the_nearest_training_picture() -> None:
    """In grey of no certain brightness and on any background, so edges are compared. Guessing gives 0.25."""

    def edges(images: Tensor) -> Tensor:
        steps = (images[:, :, 1:, 1:] - images[:, :, :-1, 1:]).abs() + (images[:, :, 1:, 1:] - images[:, :, 1:, :-1]).abs()
        flat = torch.nn.functional.avg_pool2d(steps, 5, 2).flatten(1)
        return torch.nn.functional.normalize(flat, dim=1)

    known, classes = Fractals("train", 4, (32, 32), **GREY).batch(range(600))
    asked, expected = Fractals("held-out", 4, (32, 32), **GREY).batch(range(100))
    nearest = (edges(asked) @ edges(known).T).argmax(1)
    assert (classes[nearest] == expected).float().mean() > 0.7
