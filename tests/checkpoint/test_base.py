"""Bases are built from timm's and vit-pytorch's names and from plain values, and from nothing else."""

from __future__ import annotations

from typing import Any

import pytest
import timm
import torch
from torch import nn

from flysurgery.checkpoint import build_base
from flysurgery.errors import ModelError
from tests.checkpoint.conftest import ARGUMENTS, BASE, VIT_PYTORCH


def test_timm_base_equals_timm() -> None:
    torch.manual_seed(5)
    built = build_base(BASE, ARGUMENTS)
    torch.manual_seed(5)
    expected = timm.create_model(BASE, **ARGUMENTS)
    assert all(torch.equal(a, b) for a, b in zip(built.state_dict().values(), expected.state_dict().values(), strict=True))
    assert build_base("vit_tiny_patch16_224.augreg_in21k", {"depth": 1}, device="meta").num_classes == 21843


def test_meta_takes_no_memory() -> None:
    model = build_base("vit_giant_patch14_224", {}, device="meta")
    assert all(tensor.is_meta for tensor in model.state_dict().values())
    assert sum(parameter.numel() for parameter in model.parameters()) > 10**9


@pytest.mark.parametrize("base", ["vit_pytorch:ViT", "vit_pytorch.vit:ViT", "vit_pytorch.simple_vit:SimpleViT"])
def test_vit_pytorch_names(base: str) -> None:
    """A size of two sides is a list in JSON, and must become a tuple."""
    model = build_base(base, {**VIT_PYTORCH, "image_size": [16, 32]})
    assert type(model).__name__ == base.partition(":")[2] and model(torch.zeros(1, 3, 16, 32)).shape == (1, 5)


def test_torchvision_names() -> None:
    model = build_base("torchvision:vit_b_16", {"image_size": 32, "num_classes": 5}, device="meta")
    assert model(torch.zeros(1, 3, 32, 32, device="meta")).shape == (1, 5)
    for name in ("torchvision:vit_b_17", "torchvision:get_model", "torchvision:_utils", "torchvision.ops:nms", "torchvision:"):
        with pytest.raises(ModelError):
            build_base(name)
    with pytest.raises(ModelError, match="may not set weights"):
        build_base("torchvision:vit_b_16", {"weights": "DEFAULT"})


TIMM_LOOKALIKES = ("", "é", "/etc", "vit_pytorch", "vit_pytorch/vit", "vit_tiny_patch16_224.x y", "flysurgery_structured.x")
PREFIXED = (
    ":",
    "torch.nn:Linear",
    "local-dir:/",
    "vit_pytorch:",
    "vit_pytorch..vit:ViT",
    "vit_pytorch.vit.x:ViT",
    "vit_pytorch:ViT.forward",
)
NO_MODEL_CLASSES = ("vit_pytorch:nonesuch", "vit_pytorch.vit:Module", "vit_pytorch.vit:pair", "vit_pytorch.vit:torch")


@pytest.mark.parametrize("base", [*TIMM_LOOKALIKES, *PREFIXED, *NO_MODEL_CLASSES])
def test_names_that_are_none(base: str) -> None:
    with pytest.raises(ModelError):
        build_base(base, VIT_PYTORCH)


@pytest.mark.parametrize(
    ("arguments", "fact"),
    [
        ([("depth", 1)], "must map argument names to values"),
        ({"depth of": 1}, "must map argument names to values"),
        ({"norm_layer": nn.LayerNorm}, "norm_layer must be a value that JSON has"),
        ({"sizes": {1: 2}}, "sizes must be a value that JSON has"),
        ({"depth": -(10**400)}, "depth must be a number of at most 16777216"),
        ({"drop_rate": float("nan")}, "drop_rate must be a number"),
        ({"img_size": [16, float("inf")]}, "img_size must be a number"),
        ({"cache_dir": "/", "checkpoint_path": "x"}, "may not set cache_dir, checkpoint_path"),
        ({"depth": -1, "embed_dim": 31}, f"{BASE} cannot be built"),
        ({"surprise": 1}, "surprise"),
    ],
)
def test_arguments_that_are_refused(arguments: Any, fact: str) -> None:
    with pytest.raises(ModelError, match=fact) as caught:
        build_base(BASE, arguments)
    assert "\n" not in str(caught.value)
