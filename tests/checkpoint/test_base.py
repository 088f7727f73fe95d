"""Bases are built from names of libraries and plain values alone, and what building may take is counted before it is taken."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
from torch import nn

from flysurgery.checkpoint import build_base, check_base
from flysurgery.checkpoint.meter import LimitError, Limits, metered
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


@pytest.mark.parametrize(
    ("base", "arguments"),
    [
        *((base, VIT_PYTORCH | {"image_size": [16, 32]}) for base in ("vit_pytorch:ViT", "vit_pytorch.simple_vit:SimpleViT")),
        ("torchvision:vit_b_16", {"image_size": 32, "num_classes": 5}),
    ],
)
def test_bases_of_other_libraries(base: str, arguments: dict[str, Any]) -> None:
    """A size of two sides is a list in JSON, and must become a tuple."""
    sides = (16, 32) if "vit_pytorch" in base else (32, 32)
    assert build_base(base, arguments, device="meta")(torch.zeros(1, 3, *sides, device="meta")).shape == (1, 5)


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


LIMITS = Limits(steps=300, nbytes=1 << 20)

BUILDS: dict[str, Callable[[str], object]] = {
    "zeros": lambda device: torch.zeros(1 << 40, device=device),
    "arange": lambda device: torch.arange(1 << 50, device=device),
    "broadcast": lambda device: torch.arange(100_000, device=device)[:, None] - torch.arange(100_000, device=device),
    "repeat": lambda device: torch.arange(2000, device=device)[:, None].repeat(1, 2000),
    "many": lambda device: [torch.ones(10_000, device=device) for _ in range(100)],
    "unbind": lambda device: list(torch.ones(50_000, device=device)),
    "numbers": lambda device: torch.tensor([1.0] * 300_000, device=device),
}
CASES = [(build, device) for build in BUILDS for device in ("cpu", "meta") if (build, device) != ("numbers", "meta")]
"""From PyTorch 2.14 on, numbers that go to meta make no tensor before."""


@pytest.mark.parametrize(("build", "device"), CASES)
def test_bytes_are_refused_before_they_are_taken(build: str, device: str) -> None:
    """Some of these are terabytes, which no machine gives."""
    with pytest.raises(LimitError, match="more than 1,048,576 bytes besides its parameters"), metered(LIMITS, parameters_on_meta=True):
        BUILDS[build](device)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"depth": 1, "inner": {"num_layers": 100_000}}, "num_layers is 100000, and models have at most"),
        ({"window_size": (7, 500)}, "window_size is 500, and the tensors that are stored allow windows of at most"),
        ({"names": ["a"] * 20, "count": 10_000}, "10000 times what names lists is too much for the tensors that are stored"),
    ],
)
def test_arguments_that_would_loop_in_python_are_refused(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(LimitError, match=words):
        LIMITS.check_arguments(arguments)
    LIMITS.check_arguments({"depth": 12, "window_size": (2, 2), "names": ["a"] * 20, "count": 1000})


@pytest.mark.parametrize(
    "build",
    [
        lambda: [nn.LayerNorm(1) for _ in range(60)],
        lambda: nn.Sequential(*[nn.Identity() for _ in range(301)]),
        lambda: [torch.ones(1) for _ in range(301)],
    ],
)
def test_parameters_modules_and_operations_are_counted(build: Callable[[], object]) -> None:
    with pytest.raises(LimitError, match="300 steps, too much for the tensors that are stored"), metered(LIMITS, parameters_on_meta=True):
        build()
    build()


def test_parameters_on_meta_and_views_take_nothing_and_tied_ones_stay_tied() -> None:
    with metered(LIMITS, parameters_on_meta=True):
        layer, other = nn.Linear(4096, 4096), nn.Linear(8, 8, bias=False)
        other.weight = layer.weight
        table = torch.ones(100_000)
        for _ in range(50):
            table = table.view(100, 1000).T.T.flatten()
    assert layer.weight.is_meta and layer.weight.requires_grad and other.weight is layer.weight and not table.is_meta
    with pytest.raises(LimitError, match="bytes"), metered(LIMITS, parameters_on_meta=False):
        nn.Linear(4096, 4096)


def test_another_thread_builds_as_it_likes() -> None:
    made: list[nn.Module] = []
    with metered(LIMITS, parameters_on_meta=True):
        thread = threading.Thread(target=lambda: made.append(nn.Sequential(*[nn.Linear(600, 600) for _ in range(9)])))
        thread.start()
        thread.join()
    assert not any(parameter.is_meta for parameter in made[0].parameters())
