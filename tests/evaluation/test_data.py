"""Data sets are prepared for the model's input, and refused where they cannot belong to it."""

from __future__ import annotations

import builtins
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

from flysurgery.errors import DataError, WalkError
from flysurgery.evaluation import ImageData, digits, evaluate, load_data

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
    imports = builtins.__import__

    def without(name: str, *args: Any, **options: Any) -> Any:
        if name.startswith("sklearn"):
            raise ImportError(name)
        return imports(name, *args, **options)

    monkeypatch.setattr(builtins, "__import__", without)
    monkeypatch.delitem(sys.modules, "sklearn.datasets", raising=False)
    with pytest.raises(DataError, match=r"pip install 'flysurgery\[train\]'"):
        digits("train", (8, 8), mean=(0.5,), std=(0.25,))


def test_models_on_meta_and_of_vit_pytorch() -> None:
    from vit_pytorch import ViT

    with torch.device("meta"):
        skeleton = model(10)
    assert load_data("digits", skeleton).dataset[0][0].shape == (3, 16, 16)
    vit = ViT(image_size=32, patch_size=8, num_classes=10, dim=32, depth=1, heads=2, mlp_dim=64)
    data = load_data("digits", vit)
    assert data.dataset[0][0].shape == (3, 32, 32)
    assert evaluate(vit, data, batch_size=300).samples == 599


def test_image_folder(pictures: Path) -> None:
    data = load_data(pictures, model(3))
    assert (data.samples, data.num_classes, data.workers) == (6, 3, 0)
    for index, (image, label) in enumerate(data.dataset[i] for i in range(6)):
        colour = torch.tensor(list(COLOURS.values())[index // 2]) / 255
        assert label == index // 2
        assert torch.equal(image, ((colour - 0.5) / 0.5)[:, None, None].expand(3, 16, 16))
    assert load_data(pictures, model(3, in_chans=1)).dataset[0][0].shape == (1, 16, 16), "a grey model reads grey pictures"


def test_colours_are_told_apart(pictures: Path) -> None:
    """A model that looks at channels: index 2 is red, the last in the order of names."""

    class Channels(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return images.mean((2, 3)).flip(1) * self.scale

    found = evaluate(Channels(), load_data(pictures, model(3)))
    assert (found.top1, found.top5) == (1.0, 1.0)


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
def test_damaged_picture(workers: int, pictures: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (pictures / "green" / "1.png").write_bytes((pictures / "green" / "1.png").read_bytes()[:40])
    data = load_data(pictures, model(3))
    monkeypatch.setattr(ImageData, "workers", workers)
    with pytest.raises(DataError, match=r"^\S*green/1\.png cannot be read as an image: ") as caught:
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
