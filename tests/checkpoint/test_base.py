"""Bases are built from names of libraries and plain values alone, and what building may take is counted before it is taken."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
from torch import nn

from flysurgery.checkpoint import build_base
from flysurgery.checkpoint.meter import LimitError, Limits, metered
from flysurgery.errors import ModelError
from tests.checkpoint.conftest import ARGUMENTS, BASE, VIT_PYTORCH


def test_bases_are_what_their_libraries_build() -> None:
    """A size of two sides is a list in JSON, and must become a tuple."""
    torch.manual_seed(5)
    built = build_base(BASE, ARGUMENTS)
    torch.manual_seed(5)
    expected = timm.create_model(BASE, **ARGUMENTS)
    assert all(torch.equal(a, b) for a, b in zip(built.state_dict().values(), expected.state_dict().values(), strict=True))
    giant = build_base("vit_giant_patch14_clip_224.laion2b", {"depth": 100}, device="meta")
    assert giant.num_classes == 1024 and all(tensor.is_meta for tensor in giant.state_dict().values())
    for base in ("vit_pytorch:ViT", "vit_pytorch.simple_vit:SimpleViT"):
        model = build_base(base, VIT_PYTORCH | {"image_size": [16, 32]}, device="meta")
        assert model(torch.zeros(1, 3, 16, 32, device="meta")).shape == (1, 5)
    model = build_base("torchvision:vit_b_16", {"image_size": 32, "num_classes": 5}, device="meta")
    assert model(torch.zeros(1, 3, 32, 32, device="meta")).shape == (1, 5)


NAMES = (  # those that look like timm's, those with a prefix, and what is in a library and no class of models
    *("", "é", "/etc", "vit_pytorch", "vit_pytorch/vit", "vit_tiny_patch16_224.x y", "flysurgery_structured.x"),
    *(":", "torch.nn:Linear", "local-dir:/", "vit_pytorch:", "vit_pytorch..vit:ViT", "vit_pytorch.vit.x:ViT", "vit_pytorch:ViT.forward"),
    *("vit_pytorch:nonesuch", "vit_pytorch.vit:Rearrange", "vit_pytorch.vit:pair", "vit_pytorch.vit:torch"),
    *("torchvision:vit_b_17", "torchvision:get_model", "torchvision:_utils", "torchvision.ops:nms", "torchvision:"),
    *("transformers:Nothing", "transformers:ViTConfig"),
)
REFUSED: list[tuple[str, Any, str | None]] = [
    *((name, {}, None) for name in NAMES),
    (BASE, [("depth", 1)], "must map argument names to values"),
    (BASE, {"depth of": 1}, "must map argument names to values"),
    (BASE, {"norm_layer": nn.LayerNorm}, "norm_layer must be a value that JSON has"),
    (BASE, {"sizes": {1: 2}}, "sizes must be a value that JSON has"),
    (BASE, {"depth": -(10**400)}, "depth must be a number of at most 16777216"),
    (BASE, {"drop_rate": float("nan")}, "drop_rate must be a number"),
    (BASE, {"img_size": [16, float("inf")]}, "img_size must be a number"),
    (BASE, {"cache_dir": "/", "checkpoint_path": "x"}, "may not set cache_dir, checkpoint_path"),
    (BASE, {"depth": -1, "embed_dim": 31}, f"{BASE} cannot be built"),
    (BASE, {"surprise": 1}, "surprise"),
    ("torchvision:vit_b_16", {"weights": "DEFAULT"}, "may not set weights"),
    ("transformers:ViTModel", {"attn_implementation": "a/b"}, "may not set attn_implementation"),
    ("transformers:ViTModel", {"_attn_implementation": "a/b"}, "may not set _attn_implementation"),
    ("transformers:TimmWrapperModel", {"model_args": {"checkpoint_path": "a.pth"}}, "may not set checkpoint_path"),
    ("transformers:DetrModel", {"backbone_config": {"use_pretrained_backbone": True}}, "may not set use_pretrained_backbone"),
    ("transformers:DetrModel", {"backbone_config": {"backbone": "hf-hub:a/b"}}, "may not name models from elsewhere"),
]


@pytest.mark.parametrize(("base", "arguments", "fact"), REFUSED)
def test_names_and_arguments_that_are_refused(base: str, arguments: Any, fact: str | None) -> None:
    with pytest.raises(ModelError, match=fact) as caught:
        build_base(base, arguments, device="meta")
    assert "\n" not in str(caught.value)


LIMITS = Limits(steps=300, nbytes=1 << 20)
BYTES, STEPS = "more than 1,048,576 bytes besides its parameters", "300 steps, too much for the tensors that are stored"
BUILDS: list[tuple[str, Callable[[str], object]]] = [  # some of these are terabytes, which no machine gives
    (BYTES, lambda device: torch.zeros(1 << 40, device=device)),
    (BYTES, lambda device: torch.arange(1 << 50, device=device)),
    (BYTES, lambda device: torch.arange(100_000, device=device)[:, None] - torch.arange(100_000, device=device)),
    (BYTES, lambda device: torch.arange(2000, device=device)[:, None].repeat(1, 2000)),
    (BYTES, lambda device: [torch.ones(10_000, device=device) for _ in range(100)]),
    (BYTES, lambda device: list(torch.ones(50_000, device=device))),
    (BYTES, lambda _: torch.tensor([1.0] * 300_000)),
    (STEPS, lambda device: [nn.LayerNorm(1, device=device) for _ in range(60)]),
    (STEPS, lambda _: nn.Sequential(*[nn.Identity() for _ in range(301)])),
    (STEPS, lambda device: [torch.ones(1, device=device) for _ in range(301)]),
]


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(("words", "build"), BUILDS)
def test_bytes_and_steps_are_counted_before_they_are_taken(words: str, build: Callable[[str], object], device: str) -> None:
    with pytest.raises(LimitError, match=words), metered(LIMITS, parameters_on_meta=True):
        build(device)


def test_parameters_on_meta_and_views_take_nothing_and_another_thread_builds_as_it_likes() -> None:
    made: list[nn.Module] = []
    with metered(LIMITS, parameters_on_meta=True):
        layer, other = nn.Linear(4096, 4096), nn.Linear(8, 8, bias=False)
        other.weight = layer.weight
        table = torch.ones(100_000)
        for _ in range(50):
            table = table.view(100, 1000).T.T.flatten()
        thread = threading.Thread(target=lambda: made.append(nn.Sequential(*[nn.Linear(60, 60) for _ in range(301)])))
        thread.start()
        thread.join()
    assert layer.weight.is_meta and layer.weight.requires_grad and other.weight is layer.weight and not table.is_meta
    assert not any(parameter.is_meta for parameter in made[0].parameters())
    with pytest.raises(LimitError, match="bytes"), metered(LIMITS, parameters_on_meta=False):
        nn.Linear(4096, 4096)
    assert len([nn.Identity() for _ in range(301)]) == 301, "nothing is counted afterwards"
