"""Inputs that models accept."""

from __future__ import annotations

import importlib

import pytest
import timm
import torch
from torch import Tensor, nn

from flysurgery.errors import WalkError
from flysurgery.walker import EXAMPLE_BATCH, example_input, walk
from tests.walker.toys import FusedAttention


@pytest.mark.parametrize(
    ("name", "options", "size"),
    [
        ("vit_tiny_patch16_224", {"depth": 1}, (3, 224, 224)),
        ("vit_tiny_patch16_384", {"depth": 1}, (3, 384, 384)),
        ("vit_tiny_patch16_224", {"depth": 1, "img_size": (32, 64), "in_chans": 1}, (1, 32, 64)),
        ("eva02_tiny_patch14_336", {"depth": 1}, (3, 336, 336)),
        ("swin_tiny_patch4_window7_224", {"img_size": 64, "window_size": 4, "in_chans": 4}, (4, 64, 64)),
        ("coat_tiny", {"img_size": 64}, (3, 64, 64)),
        ("resnet18", {"in_chans": 2}, (2, 224, 224)),
        ("tresnet_m", {}, (3, 224, 224)),  # whose first convolution takes 48 channels, made of pixels
    ],
)
def test_timm(name: str, options: dict[str, object], size: tuple[int, ...]) -> None:
    with torch.device("meta"):
        model = timm.create_model(name, **options)  # pyright: ignore[reportArgumentType]
    example = example_input(model)
    assert tuple(example.shape) == (EXAMPLE_BATCH, *size)
    assert (example.device.type, example.dtype) == ("meta", torch.float32)


TRANSFORMER = {"patch_size": 8, "num_classes": 10, "dim": 24, "depth": 1, "heads": 2, "mlp_dim": 48, "dim_head": 12}


@pytest.mark.parametrize(
    ("module", "name", "options", "size"),
    [
        ("vit", "ViT", {"image_size": 64}, (3, 64, 64)),
        ("vit", "ViT", {"image_size": 32, "channels": 1, "pool": "mean"}, (1, 32, 32)),
        ("vit", "ViT", {"image_size": (32, 48)}, (3, 32, 48)),
        ("simple_vit", "SimpleViT", {"image_size": 40, "channels": 2}, (2, 40, 40)),
        ("vit_with_patch_merger", "ViT", {"image_size": 32}, (3, 32, 32)),
        ("vit_1d", "ViT", {"seq_len": 64}, (3, 64)),
    ],
)
def test_vit_pytorch(module: str, name: str, options: dict[str, object], size: tuple[int, ...]) -> None:
    model = getattr(importlib.import_module(f"vit_pytorch.{module}"), name)(**TRANSFORMER, **options)
    example = example_input(model)
    assert sorted(example.shape) == sorted((EXAMPLE_BATCH, *size))
    assert example.shape[1] == size[0]
    assert model.eval()(example).shape == (EXAMPLE_BATCH, 10)


def test_a_convolutional_stem_of_unknown_make() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Conv2d(5, 8, 16, stride=16)
            self.positions = nn.Parameter(torch.zeros(8, 8, 8))

        def forward(self, x: Tensor) -> Tensor:
            return self.stem(x) + self.positions

    assert tuple(example_input(Net().double()).shape) == (EXAMPLE_BATCH, 5, 128, 128)
    assert example_input(Net().double()).dtype == torch.float64


def test_unknown() -> None:
    with pytest.raises(
        WalkError,
        match=r"no example input is known for FusedAttention, and zeros of shape \(2, .*\) fail \(.+\); give an example",
    ):
        example_input(FusedAttention())


def test_a_configuration_without_a_size() -> None:
    class Rigid(FusedAttention):
        config = type("Config", (), {"to_dict": dict})()

    with pytest.raises(WalkError, match=r"known for Rigid, whose configuration names no image_size, and zeros .* fail .*give an example"):
        example_input(Rigid())


def test_a_model_of_two_inputs_that_got_one() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, ids: Tensor, images: Tensor | None = None) -> Tensor:
            assert images is not None, "images are missing"
            return self.linear(images) + ids

    sentence = r"images are missing; the example gives ids, and the forward also takes images: give what it needs, as a tuple or a dict$"
    with pytest.raises(WalkError, match=sentence):
        walk(Pair(), torch.zeros(2, 8))
    with pytest.raises(WalkError, match=r"missing 1 required positional argument.*; give an example: a tensor, a tuple or a dict"):
        example_input(type("Needy", (Pair,), {"forward": lambda self, ids, images: self.linear(images) + ids})())
    assert len(walk(Pair(), (torch.zeros(2, 8), torch.zeros(2, 8)))) == 1
