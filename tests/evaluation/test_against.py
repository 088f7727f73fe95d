"""One model held against another, on images without labels: what is compared, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from torch import Tensor, nn

from flysurgery import convert
from flysurgery.calibration import Samples
from flysurgery.errors import DataError, FlysurgeryError, OptionError, SurgeryError
from flysurgery.evaluation import compare, digits, load_unseen
from flysurgery.inference import clock, optimize

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


def test_a_converted_model_is_compared_block_by_block(converted: nn.Module) -> None:
    dense = vit()
    with torch.no_grad():
        given, wanted = converted(inputs().inputs), dense(inputs().inputs)
    cosine = float(torch.cosine_similarity(given, wanted).mean())
    found = compare(converted, dense, inputs(), batch_size=4)
    assert found.samples == 6 and found.agreement == pytest.approx(float((given.argmax(1) == wanted.argmax(1)).float().mean()))
    assert found.token_cosine is not None and found.token_cosine < 0.999
    for each in (found, compare(dense, converted, inputs())):
        assert each.output_cosine == pytest.approx(cosine, abs=1e-5)
        assert [name for name, _ in each.blocks] == ["blocks.0", "blocks.1"] and all(error > 0.01 for _, error in each.blocks)


def test_models_without_the_same_blocks_are_compared_by_their_tokens_or_scores(converted: nn.Module) -> None:
    other, teacher = vit(), vit()
    convert(other, nblocks=2)
    for one, two in ((other, converted), (vit(depth=1), teacher), (vit(depth=3), teacher)):
        found = compare(one, two, inputs())
        assert found.blocks == () and found.token_cosine is not None and found.token_cosine < 0.9999 and 0.01 < found.relative_error < 2
    for other in (vit(embed_dim=32), vit(patch_size=4), timm.create_model("resnet10t", num_classes=10)):
        other.pretrained_cfg = teacher.pretrained_cfg | {"input_size": (3, 16, 16)}
        found = compare(other, teacher, inputs())
        assert found.blocks == () and found.token_cosine is None and found.output_cosine < 0.99


def test_a_folder_of_any_depth_gives_its_images_and_the_digits_those_that_calibration_does_not_take(
    converted: nn.Module, tmp_path: Path
) -> None:
    (tmp_path / "deeper").mkdir()
    pixels = np.random.default_rng(0)
    for index in range(6):
        name = f"deeper/{index}.png" if index % 2 else f"{index}.png"
        Image.fromarray(pixels.integers(0, 255, (16, 16, 3), np.uint8)).save(tmp_path / name)
    assert [compare(converted, vit(), tmp_path, count).samples for count in (None, 4)] == [6, 4]
    headless = compare(vit(num_classes=0), vit(num_classes=0), tmp_path)
    assert headless.agreement is None and headless.output_cosine == pytest.approx(1, abs=1e-5)
    held_out: Tensor = digits("held-out", (16, 16), mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5)).tensors[0]
    found = load_unseen("digits", vit())
    assert found.name == "digits" and torch.equal(found.inputs, held_out[:512])
    assert len(load_unseen("fractals", vit(), samples=20)) == 20


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


@pytest.mark.parametrize(
    ("data", "options", "error", "words"),
    [
        ("nowhere", {}, DataError, "no data set 'nowhere'"),
        (Path(__file__).parent, {}, DataError, "no images"),
        ("digits", {"samples": 600}, DataError, "600 were asked for and there are 599"),
        (inputs(), {"samples": 9}, DataError, "9 were asked for and there are 6"),
        (Samples(torch.full((4, 3, 16, 16), float("nan"))), {}, DataError, "NaN or infinite entries"),
        (inputs(), {"batch_size": 0}, OptionError, "batch_size must be at least 1, got 0"),
    ],
)
def test_data_that_cannot_be_compared_on(
    converted: nn.Module, data: Any, options: dict[str, int], error: type[FlysurgeryError], words: str
) -> None:
    with pytest.raises(error, match=words):
        compare(converted, vit(), data, **options)


def test_an_optimized_model_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock, "medians_ms", lambda ways, inputs, **_: (2.0, 1.0))  # else the clock decides whether a layer is fused
    model = vit()
    optimize(model)
    with pytest.raises(SurgeryError, match=r"flysurgery.restore\(model\)"):
        compare(model, vit(), inputs())
