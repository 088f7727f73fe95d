"""Accuracy is counted right, the model is left as it was, and the demo checkpoint is what its card says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from flysurgery.checkpoint import build_base, load, load_dense, save
from flysurgery.errors import DataError, OptionError
from flysurgery.evaluation import Accuracy, ImageData, evaluate, load_data
from flysurgery.inference import convert

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


def test_counts() -> None:
    ranks = torch.tensor([0, 0, 0, 1, 4, 5, 6, 6])  # how many classes score higher than the right one
    classes = torch.arange(8) % CLASSES
    scores = torch.stack([torch.arange(CLASSES - 1.0, -1.0, -1.0).roll(int(c - r)) for c, r in zip(classes, ranks, strict=True)])
    model = Lookup()
    found = evaluate(model, data(scores, classes), batch_size=3)
    assert (found.top1, found.top5, found.samples) == (3 / 8, 5 / 8, 8)
    assert found.seconds > 0 and model.batches == [3, 3, 2]
    few = evaluate(Lookup(), data(torch.eye(3), torch.tensor([0, 1, 0]), 3))
    assert (few.top1, few.top5) == (2 / 3, 1.0), "of fewer than five classes all count"
    with pytest.raises(OptionError, match="at least 1, got 0"):
        evaluate(model, data(scores, classes), batch_size=0)
    assert str(Accuracy(0.985, 1.0, 599, 2.04)) == "top-1 98.50%, top-5 100.00% of 599 samples in 2.0 s"


def test_any_iterable_of_images_and_labels() -> None:
    images, classes = torch.eye(CLASSES)[:, None, None, :], torch.tensor([0, 1, 2, 3, 4, 5, 0])
    loader = DataLoader(TensorDataset(images, classes), batch_size=3)
    for given in (loader, list(loader), ((image[None], label[None]) for image, label in zip(images, classes, strict=True))):
        found = evaluate(Lookup(), given)
        assert (found.top1, found.samples) == (6 / 7, 7)


@pytest.mark.parametrize(
    ("given", "fact"),
    [
        (3, r"expected a model and then a DataLoader .*, got Lookup and int"),
        ([], "there are no images"),
        ([torch.zeros(2, 1, 1, 7)], r"batches \(images, labels\).*got \(torch.float32 \(2, 1, 1, 7\)\)"),
        ([(torch.zeros(1, 1, 7), 3)], r"got \(torch.float32 \(1, 1, 7\), int\)"),
        ([(torch.zeros(2, 1, 1, 7), torch.zeros(2, 7))], r"got .*torch.float32 \(2, 7\)\)"),
        ([(torch.zeros(2, 1, 1, 7), torch.tensor([0, 7]))], "tells 7 classes apart, got labels from 0 to 7"),
    ],
)
def test_what_is_no_batch_of_images_and_labels(given: Any, fact: str) -> None:
    with pytest.raises(DataError, match=fact):
        evaluate(Lookup(), given)


def test_modes_are_set_back_and_images_cast_to_the_model() -> None:
    model = nn.Sequential(Lookup(), nn.Dropout()).bfloat16()
    model[1].eval()
    assert evaluate(model, data(torch.eye(CLASSES), torch.arange(CLASSES))).top1 == 1.0
    assert [module.training for module in model.modules()] == [True, True, False]


def test_what_a_forward_makes_may_be_trained_with_later() -> None:
    """FSDP2 gathers weights in a forward and goes on with them; tensors of inference mode cannot be trained with."""
    kept: list[Tensor] = []
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 3))
    model.register_forward_hook(lambda module, inputs, output: kept.append(output))
    evaluate(model, ImageData("noise", TensorDataset(torch.rand(4, 3, 2, 2), torch.zeros(4, dtype=torch.int64)), 4, 3))
    assert not kept[0].is_inference() and not kept[0].requires_grad


@pytest.mark.parametrize(
    ("model", "fact"),
    [
        (nn.Sequential(Lookup(), nn.Linear(CLASSES, 4)), r"test has 7 classes, so scores of shape \(7, 7\) were expected, got \(7, 4\)"),
        (nn.Sequential(nn.Linear(CLASSES, CLASSES)), r"got \(7, 1, 1, 7\)"),
        (nn.Sequential(nn.Flatten(), nn.Linear(CLASSES, CLASSES), nn.Softmax(0), nn.Unflatten(0, (-1, 7))), r"got \(1, 7, 7\)"),
    ],
)
def test_outputs_that_are_no_scores(model: nn.Module, fact: str) -> None:
    with pytest.raises(DataError, match=fact):
        evaluate(model, data(torch.eye(CLASSES), torch.arange(CLASSES)))
    assert model.training


ROOT = Path(__file__).parents[2]

DEMO = ROOT / "checkpoints" / "digits_vit"


def test_the_demo_is_as_accurate_and_small_as_stated_and_timm_opens_it() -> None:
    model, base, base_args = load_dense(DEMO)
    found = evaluate(model, load_data("digits", model))
    stated = re.search(r"\*\*([\d.]+)%\*\* top-1", (DEMO / "README.md").read_text())
    assert stated is not None and f"{found.top1:.2%}" == f"{stated[1]}%"
    assert found.top1 >= 0.975 and found.samples == 599
    assert (DEMO / "model.safetensors").stat().st_size <= 4_000_000
    skeleton = build_base(base, base_args, device="meta")
    assert {n: t.shape for n, t in skeleton.state_dict().items()} == {n: t.shape for n, t in model.state_dict().items()}
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
