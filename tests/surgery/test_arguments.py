"""What is given in the place of a model, a plan or a folder: one sentence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
from torch import nn

import flysurgery
from flysurgery.errors import OptionError


def model() -> nn.Module:
    return timm.create_model("vit_tiny_patch16_224", depth=1, img_size=32, num_classes=3)


@pytest.mark.parametrize(
    ("call", "sentence"),
    [  # each is what a type checker would find
        (lambda: flysurgery.plan("vit_tiny"), r"got str; build it first, as with timm.create_model\('vit_tiny'\)"),
        (lambda: flysurgery.convert(3), "expected a torch.nn.Module, got int"),
        (
            lambda: flysurgery.apply(model(), flysurgery.plan(model())),
            "expected a plan and then a model, got VisionTransformer and Plan",
        ),
        (lambda: flysurgery.densify("folder"), "expected a torch.nn.Module, got str"),
        (lambda: flysurgery.save("folder", model()), "expected a model and then a folder, got str and VisionTransformer"),
    ],
)
def test_arguments_that_are_none(call: Callable[[], Any], sentence: str) -> None:
    with pytest.raises(flysurgery.FlysurgeryError, match=sentence):
        call()


def test_auto_is_an_architecture_in_python_too() -> None:
    with pytest.raises(OptionError, match="arch 'auto' needs what it is to choose by"):
        flysurgery.convert(model(), "auto")
    report = flysurgery.convert(model(), "auto", budget=0.5)
    assert isinstance(report, flysurgery.Report) and report.tradeoff is not None
    assert report.tradeoff.chosen.share <= 0.5


def test_every_public_name_is_there() -> None:
    assert all(hasattr(flysurgery, name) for name in flysurgery.__all__)
    converted = model()
    flysurgery.convert(converted)
    assert any(isinstance(module, flysurgery.ButterflyLinear) for module in converted.modules())
    assert torch.isfinite(converted(torch.randn(1, 3, 32, 32))).all()
