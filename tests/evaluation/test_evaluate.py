"""Accuracy is counted right, one model is held against another, models are left as they were, and the demo is what its card says."""

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from flysurgery.calibration import Samples
from flysurgery.checkpoint import load, load_dense, save
from flysurgery.errors import DataError, OptionError, SurgeryError
from flysurgery.evaluation import ImageData, compare, digits, evaluate, load_data, load_unseen
from flysurgery.inference import clock, optimize
from flysurgery.surgery import convert
from tests.support import models
from tests.support.models import images

CLASSES = 7


class Lookup(nn.Module):
    """Gives the scores that its images hold, in training mode other ones."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.batches: list[int] = []

    def forward(self, images: Tensor) -> Tensor:
        assert not torch.is_grad_enabled()
        self.batches.append(len(images))
        return images[:, 0, 0, :] * self.scale * (-1 if self.training else 1)


def data(scores: Tensor, classes: Tensor, num_classes: int = CLASSES) -> ImageData:
    return ImageData("test", TensorDataset(scores[:, None, None, :], classes), len(scores), num_classes)


def test_counts_of_data_and_of_any_iterable_of_images_and_labels() -> None:
    ranks = torch.tensor([0, 0, 0, 1, 4, 5, 6, 6])  # how many classes score higher than the right one
    classes = torch.arange(8) % CLASSES
    scores = torch.stack([torch.arange(CLASSES - 1.0, -1.0, -1.0).roll(int(c - r)) for c, r in zip(classes, ranks, strict=True)])
    model = Lookup()
    found = evaluate(model, data(scores, classes), batch_size=3)
    assert (found.top1, found.top5, found.samples) == (3 / 8, 5 / 8, 8)
    assert found.seconds > 0 and model.batches == [3, 3, 2]
    few = evaluate(Lookup(), data(torch.eye(3), torch.tensor([0, 1, 0]), 3))
    assert (few.top1, few.top5) == (2 / 3, 1.0), "of fewer than five classes all count"
    images, classes = torch.eye(CLASSES)[:, None, None, :], torch.tensor([0, 1, 2, 3, 4, 5, 0])
    loader = DataLoader(TensorDataset(images, classes), batch_size=3)
    for given in (loader, list(loader), ((image[None], label[None]) for image, label in zip(images, classes, strict=True))):
        found = evaluate(Lookup(), given)
        assert (found.top1, found.samples) == (6 / 7, 7)
    with pytest.raises(OptionError, match="at least 1, got 0"):
        evaluate(model, data(torch.eye(3), torch.tensor([0, 1, 0]), 3), batch_size=0)
    assert str(few).startswith("top-1 66.67%, top-5 100.00% of 3 samples in ")


def test_modes_are_set_back_images_cast_and_what_a_forward_makes_may_be_trained_with_later() -> None:
    """FSDP2 gathers weights in a forward and goes on with them; tensors of inference mode cannot be trained with."""
    kept: list[Tensor] = []
    model = nn.Sequential(Lookup(), nn.Dropout()).bfloat16()
    model[1].eval()
    model.register_forward_hook(lambda module, inputs, output: kept.append(output))
    assert evaluate(model, data(torch.eye(CLASSES), torch.arange(CLASSES))).top1 == 1.0
    assert [module.training for module in model.modules()] == [True, True, False]
    assert not kept[0].is_inference() and not kept[0].requires_grad


SCORES = data(torch.eye(CLASSES), torch.arange(CLASSES))
SEVEN = "test has 7 classes, so scores of shape"


@pytest.mark.parametrize(
    ("model", "given", "fact"),
    [
        (Lookup(), 3, r"expected a model and then a DataLoader .*, got Lookup and int"),
        (Lookup(), [], "there are no images"),
        (Lookup(), [torch.zeros(2, 1, 1, 7)], r"batches \(images, labels\).*got \(torch.float32 \(2, 1, 1, 7\)\)"),
        (Lookup(), [(torch.zeros(2, 1, 1, 7), torch.tensor([0, 7]))], "tells 7 classes apart, got labels from 0 to 7"),
        (nn.Sequential(Lookup(), nn.Linear(CLASSES, 4)), SCORES, rf"{SEVEN} \(7, 7\) were expected, got \(7, 4\)"),
    ],
)
def test_what_is_no_batch_of_images_and_labels_or_no_scores(model: nn.Module, given: Any, fact: str) -> None:
    with pytest.raises(DataError, match=fact):
        evaluate(model, given)
    assert model.training


DEMO = Path(__file__).parents[2] / "checkpoints" / "digits_vit"


def test_the_demo_is_as_accurate_and_small_as_stated_and_timm_opens_it() -> None:
    model = load_dense(DEMO)[0]
    found = evaluate(model, load_data("digits", model))
    stated = re.search(r"\*\*([\d.]+)%\*\* top-1", (DEMO / "README.md").read_text())
    assert stated is not None and f"{found.top1:.2%}" == f"{stated[1]}%"
    assert found.top1 >= 0.975 and found.samples == 599
    assert (DEMO / "model.safetensors").stat().st_size <= 4_000_000
    other, image = timm.create_model(f"local-dir:{DEMO}", pretrained=True).eval(), torch.randn(2, 1, 8, 8)
    with torch.no_grad():
        assert torch.equal(model(image), other(image))


@pytest.mark.parametrize(("arch", "least"), [("monarch", 0.95), ("gonon", 0.955)])
def test_converted_it_still_reads_digits(arch: str, least: float, tmp_path: Path) -> None:
    model, _, _ = load_dense(DEMO)
    data = load_data("digits", model)
    convert(model, arch)
    save(model, tmp_path / arch)
    assert evaluate(load(tmp_path / arch), data).top1 >= least


INPUTS = Samples(images())
vit = partial(models.vit, embed_dim=64, num_classes=10)


@pytest.fixture(scope="module")
def converted() -> nn.Module:
    model = vit()
    convert(model)
    return model


def test_a_converted_model_is_compared_block_by_block(converted: nn.Module) -> None:
    dense = vit()
    with torch.no_grad():
        given, wanted = converted(INPUTS.inputs), dense(INPUTS.inputs)
    cosine = float(torch.cosine_similarity(given, wanted).mean())
    found = compare(converted, dense, INPUTS, batch_size=4)
    assert found.samples == 6 and found.agreement == pytest.approx(float((given.argmax(1) == wanted.argmax(1)).float().mean()))
    assert found.token_cosine is not None and found.token_cosine < 0.999
    for each in (found, compare(dense, converted, INPUTS)):
        assert each.output_cosine == pytest.approx(cosine, abs=1e-5)
        assert [name for name, _ in each.blocks] == ["blocks.0", "blocks.1"] and all(error > 0.01 for _, error in each.blocks)


def test_models_without_the_same_blocks_are_compared_by_their_tokens_or_scores(converted: nn.Module) -> None:
    other, teacher = vit(), vit()
    convert(other, nblocks=2)
    for one, two in ((other, converted), (vit(depth=3), teacher)):
        found = compare(one, two, INPUTS)
        assert found.blocks == () and found.token_cosine is not None and found.token_cosine < 0.9999 and 0.01 < found.relative_error < 2
    for other in (vit(embed_dim=32), timm.create_model("resnet10t", num_classes=10)):
        other.pretrained_cfg = teacher.pretrained_cfg | {"input_size": (3, 16, 16)}
        found = compare(other, teacher, INPUTS)
        assert found.blocks == () and found.token_cosine is None and found.output_cosine < 0.99


def test_models_are_compared_on_images_of_a_folder_and_on_digits_and_fractals_that_nothing_was_fitted_to(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0)
    for index in range(6):
        Image.fromarray(pixels.integers(0, 255, (16, 16, 3), np.uint8)).save(tmp_path / f"{index}.png")
    headless = compare(vit(num_classes=0), vit(num_classes=0), tmp_path, 4)
    assert headless.samples == 4 and headless.agreement is None and headless.output_cosine == pytest.approx(1, abs=1e-5)
    held_out: Tensor = digits("held-out", (16, 16), mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5)).tensors[0]
    found = load_unseen("digits", vit())
    assert found.name == "digits" and torch.equal(found.inputs, held_out[:512])
    assert len(load_unseen("fractals", vit(), samples=20)) == 20


def optimized(model: nn.Module) -> None:
    with patch.object(clock, "medians_ms", return_value=(2.0, 1.0)):  # everything fused is faster
        optimize(model)


NO_NUMBERS = Samples(torch.full((4, 3, 16, 16), float("nan")))
CHANGES: dict[str, Callable[[Any], object]] = {
    "another mean or standard deviation": lambda model: setattr(model, "pretrained_cfg", model.pretrained_cfg | {"mean": (0.1, 0.2, 0.3)}),
    "gives outputs that are no finite numbers": lambda model: nn.init.constant_(model.norm.weight, float("nan")),
    r"flysurgery.restore\(model\)": optimized,
}


@pytest.mark.parametrize(
    ("model", "teacher", "data", "options", "words"),
    [
        ({}, {"img_size": 32}, INPUTS, {}, "images of 3x16x16 and the one it is held against of 3x32x32"),
        ({}, {"num_classes": 5}, INPUTS, {}, "tells 10 classes apart and the one it is held against 5"),
        ({"embed_dim": 32, "num_classes": 0}, {"num_classes": 0}, INPUTS, {}, "32 wide and the other model's 64"),
        *(({}, {}, INPUTS, {}, words) for words in CHANGES),
        ({}, {}, "digits", {"samples": 600}, "600 were asked for and there are 599"),
        ({}, {}, NO_NUMBERS, {}, "NaN or infinite entries"),
        ({}, {}, INPUTS, {"batch_size": 0}, "batch_size must be at least 1, got 0"),
    ],
)
def test_models_that_cannot_be_compared_and_data_to_compare_on(model: Any, teacher: Any, data: Any, options: Any, words: str) -> None:
    made = vit(**model)
    CHANGES.get(words, lambda model: None)(made)
    with pytest.raises((DataError, OptionError, SurgeryError), match=words):
        compare(made, vit(**teacher), data, **options)
