"""One model held against another, on images without labels: what is compared, and what is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from torch import Tensor, nn
from vit_pytorch import ViT

from flysurgery.calibration import Samples
from flysurgery.errors import DataError, OptionError, SurgeryError
from flysurgery.evaluation import compare, digits, load_unseen
from flysurgery.inference import clock, convert, optimize

ARGUMENTS: dict[str, Any] = {"img_size": 16, "patch_size": 8, "embed_dim": 64, "depth": 2, "num_heads": 2, "num_classes": 10}


def vit(seed: int = 0, **changes: Any) -> nn.Module:
    torch.manual_seed(seed)
    return timm.create_model("vit_tiny_patch16_224", **{**ARGUMENTS, **changes}).eval()


def inputs(samples: int = 6) -> Samples:
    return Samples(torch.randn(samples, 3, 16, 16, generator=torch.Generator().manual_seed(1)))


@pytest.fixture(scope="module")
def converted() -> nn.Module:
    model = vit()
    convert(model)
    return model


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """Images of random pixels, some of them in a folder of their own."""
    (tmp_path / "images" / "deeper").mkdir(parents=True)
    pixels = np.random.default_rng(0)
    for index in range(6):
        name = f"deeper/{index}.png" if index % 2 else f"{index}.png"
        Image.fromarray(pixels.integers(0, 255, (16, 16, 3), np.uint8)).save(tmp_path / "images" / name)
    return tmp_path / "images"


def test_a_converted_model_is_compared_block_by_block(converted: nn.Module) -> None:
    dense = vit()
    with torch.no_grad():
        given, wanted = converted(inputs().inputs), dense(inputs().inputs)
    found = compare(converted, dense, inputs(), batch_size=4)
    cosine = torch.cosine_similarity(given, wanted).mean()
    assert found.samples == 6 and found.output_cosine == pytest.approx(float(cosine), abs=1e-5)
    assert found.agreement == pytest.approx(float((given.argmax(1) == wanted.argmax(1)).float().mean()))
    assert [name for name, _ in found.blocks] == ["blocks.0", "blocks.1"] and all(error > 0.01 for _, error in found.blocks)
    assert found.token_cosine is not None and found.token_cosine < 0.999
    other_way = compare(dense, converted, inputs())
    assert [name for name, _ in other_way.blocks] == ["blocks.0", "blocks.1"] and other_way.output_cosine == pytest.approx(
        float(cosine), abs=1e-5
    )


def test_two_converted_models_are_compared_without_their_blocks(converted: nn.Module) -> None:
    other = vit()
    convert(other, nblocks=2)
    found = compare(other, converted, inputs())
    assert found.blocks == () and found.token_cosine is not None and 0.01 < found.relative_error < 2


def test_a_converted_vit_of_vit_pytorch() -> None:
    torch.manual_seed(0)
    dense = ViT(image_size=16, patch_size=8, num_classes=7, dim=64, depth=2, heads=2, mlp_dim=128, dim_head=32).eval()
    model = copy.deepcopy(dense)
    convert(model)
    found = compare(model, dense, inputs())
    assert [name for name, _ in found.blocks] == ["transformer.layers.1.0", "transformer.norm"]
    assert all(error > 0.01 for _, error in found.blocks)


@pytest.mark.parametrize("depth", [1, 3])
def test_models_of_other_depth_are_compared_without_their_blocks(depth: int) -> None:
    found = compare(vit(depth=depth), vit(), inputs())
    assert found.blocks == () and found.token_cosine is not None and found.token_cosine < 0.999


def test_classifiers_of_other_widths_or_patches_are_compared_by_their_scores() -> None:
    teacher = vit()
    for other in (vit(embed_dim=32), vit(patch_size=4), timm.create_model("resnet10t", num_classes=10)):
        other.pretrained_cfg = teacher.pretrained_cfg | {"input_size": (3, 16, 16)}
        found = compare(other, teacher, inputs())
        assert found.blocks == () and found.token_cosine is None and found.output_cosine < 0.99


def test_a_folder_gives_its_images_without_labels(converted: nn.Module, images: Path) -> None:
    assert compare(converted, vit(), images).samples == 6
    assert compare(converted, vit(), images, 4).samples == 4
    headless = compare(vit(num_classes=0), vit(num_classes=0), images)
    assert headless.agreement is None and headless.output_cosine == pytest.approx(1, abs=1e-5)


def test_digits_are_those_that_calibration_does_not_take() -> None:
    model = vit()
    size = {"mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5)}
    held_out: Tensor = digits("held-out", (16, 16), **size).tensors[0]
    found = load_unseen("digits", model)
    assert found.name == "digits" and torch.equal(found.inputs, held_out[:512])
    assert len(load_unseen("fractals", model, samples=20)) == 20
    with pytest.raises(DataError, match="600 were asked for and there are 599"):
        load_unseen("digits", model, samples=600)


def test_an_optimized_model_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock, "medians_ms", lambda ways, inputs, **_: (2.0, 1.0))  # else the clock decides whether a layer is fused
    model = vit()
    optimize(model)
    with pytest.raises(SurgeryError, match=r"flysurgery.restore\(model\)"):
        compare(model, vit(), inputs())


def spoilt(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        model.norm.weight.fill_(float("nan"))
    return model


def normalized(model: nn.Module) -> nn.Module:
    model.pretrained_cfg = {**model.pretrained_cfg, "mean": (0.1, 0.2, 0.3)}
    return model


@pytest.mark.parametrize(
    ("model", "teacher", "words"),
    [
        (vit, lambda: vit(img_size=32), "images of 3x16x16 and the one it is held against of 3x32x32"),
        (vit, lambda: vit(num_classes=5), "tells 10 classes apart and the one it is held against 5"),
        (lambda: vit(embed_dim=32, num_classes=0), lambda: vit(num_classes=0), "features are 32 wide and the other model's 64"),
        (lambda: normalized(vit()), vit, "another mean or standard deviation"),
        (lambda: spoilt(vit()), vit, "gives outputs that are no finite numbers"),
    ],
)
def test_models_that_cannot_be_compared(model: Callable[[], nn.Module], teacher: Callable[[], nn.Module], words: str) -> None:
    with pytest.raises(DataError, match=words):
        compare(model(), teacher(), inputs())


def test_data_that_cannot_be_compared_on(converted: nn.Module, tmp_path: Path) -> None:
    dense, broken = vit(), Samples(torch.full((4, 3, 16, 16), float("nan")))
    wrong = (("nowhere", None, "no data set 'nowhere'"), (tmp_path, None, "no images"), (inputs(), 9, "9 were asked for and there are 6"))
    for data, samples, words in (*wrong, (broken, None, "NaN or infinite entries")):
        with pytest.raises(DataError, match=words):
            compare(converted, dense, data, samples)
    with pytest.raises(OptionError, match="batch_size must be at least 1, got 0"):
        compare(converted, dense, inputs(), batch_size=0)
