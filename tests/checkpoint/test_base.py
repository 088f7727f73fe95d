"""Bases are built from the names of three libraries and from plain values, and from nothing else."""

from __future__ import annotations

from typing import Any

import pytest
import timm
import torch
from torch import nn

from flysurgery.checkpoint import build_base, check_base
from flysurgery.errors import ModelError
from tests.checkpoint.conftest import ARGUMENTS, BASE, VIT_PYTORCH


def test_timm_base_equals_timm() -> None:
    torch.manual_seed(5)
    built = build_base(BASE, ARGUMENTS)
    torch.manual_seed(5)
    expected = timm.create_model(BASE, **ARGUMENTS)
    assert all(torch.equal(a, b) for a, b in zip(built.state_dict().values(), expected.state_dict().values(), strict=True))
    giant = build_base("vit_giant_patch14_clip_224.laion2b", {"depth": 100}, device="meta")
    assert giant.num_classes == 1024 and all(tensor.is_meta for tensor in giant.state_dict().values())


@pytest.mark.parametrize("base", ["vit_pytorch:ViT", "vit_pytorch.vit:ViT", "vit_pytorch.simple_vit:SimpleViT"])
def test_vit_pytorch_names(base: str) -> None:
    """A size of two sides is a list in JSON, and must become a tuple."""
    model = build_base(base, {**VIT_PYTORCH, "image_size": [16, 32]})
    assert type(model).__name__ == base.partition(":")[2] and model(torch.zeros(1, 3, 16, 32)).shape == (1, 5)


def test_torchvision_names() -> None:
    model = build_base("torchvision:vit_b_16", {"image_size": 32, "num_classes": 5}, device="meta")
    assert model(torch.zeros(1, 3, 32, 32, device="meta")).shape == (1, 5)


NAMES = (
    *("", "é", "/etc", "vit_pytorch", "vit_pytorch/vit", "vit_tiny_patch16_224.x y", "flysurgery_structured.x"),
    *(":", "torch.nn:Linear", "local-dir:/", "vit_pytorch:", "vit_pytorch..vit:ViT", "vit_pytorch.vit.x:ViT", "vit_pytorch:ViT.forward"),
    *("vit_pytorch:nonesuch", "vit_pytorch.vit:Rearrange", "vit_pytorch.vit:pair", "vit_pytorch.vit:torch"),
    *("torchvision:vit_b_17", "torchvision:get_model", "torchvision:_utils", "torchvision.ops:nms", "torchvision:"),
    *("transformers:Nothing", "transformers:ViTConfig"),
)
"""Names of no model: those that look like timm's, those with a prefix, and what is in a library and no class of models."""


@pytest.mark.parametrize("base", NAMES)
def test_names_that_are_none(base: str) -> None:
    with pytest.raises(ModelError):
        check_base(base)


ARGUMENTS_OF: dict[str, list[tuple[Any, str]]] = {
    BASE: [
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
    "torchvision:vit_b_16": [({"weights": "DEFAULT"}, "may not set weights")],
    "transformers:ViTModel": [
        ({"attn_implementation": "a/b"}, "may not set attn_implementation"),
        ({"_attn_implementation": "a/b"}, "may not set _attn_implementation"),
    ],
    "transformers:TimmWrapperModel": [({"model_args": {"checkpoint_path": "a.pth"}}, "may not set checkpoint_path")],
    "transformers:DetrModel": [
        ({"backbone_config": {"use_pretrained_backbone": True}}, "may not set use_pretrained_backbone"),
        ({"backbone_config": {"backbone": "hf-hub:a/b"}}, "may not name models from elsewhere"),
    ],
}


@pytest.mark.parametrize(("base", "arguments", "fact"), [(base, *case) for base, cases in ARGUMENTS_OF.items() for case in cases])
def test_arguments_that_are_refused(base: str, arguments: Any, fact: str) -> None:
    with pytest.raises(ModelError, match=fact) as caught:
        build_base(base, arguments, device="meta")
    assert "\n" not in str(caught.value)
