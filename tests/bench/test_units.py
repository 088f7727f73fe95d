"""The parts of a ViT, and what is counted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from flysurgery.bench.ceilings import work_of
from flysurgery.bench.units import PROTOCOLS, converted_timm, units
from flysurgery.bench.variants import by_definition, dense_copy
from flysurgery.errors import OptionError

SIZES = {"embed_dim": 48, "depth": 1, "num_heads": 2, "img_size": 32, "patch_size": 8, "num_classes": 10}
MODEL = "vit_tiny_patch16_224"


@pytest.fixture(scope="module")
def converted() -> nn.Module:
    torch.manual_seed(0)
    return converted_timm(MODEL, SIZES, "gonon").requires_grad_(False)


def test_the_papers_model_is_a_vit_without_class_token() -> None:
    whole = next(unit for unit in units("paper", MODEL, SIZES, "monarch", 0) if unit.name == "model")
    module: Any = whole.make()
    x = torch.randn(2, *whole.shape)
    assert whole.rows == 16
    with torch.no_grad():
        got = module(x)
        assert got.shape == (2, 10)
        moved = x.roll(8, dims=3)  # by a patch: without the position embedding, the mean over patches would not notice
        module.position.zero_()
        assert torch.allclose(module(x), module(moved), atol=1e-5)
        assert not torch.allclose(module(x), module(x.roll(4, dims=3)), atol=1e-5)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_parts_are_in_eval_mode(protocol: str) -> None:
    """Else ``optimize`` leaves them as they are."""
    for unit in units(protocol, MODEL, SIZES, "gonon", 0):
        assert not any(module.training for module in unit.make().modules()), unit.name


def test_operations_are_those_of_the_products(converted: nn.Module) -> None:
    linear = nn.Linear(48, 10)
    work = work_of(linear, torch.zeros(3, 16, 48))
    assert work.flops == 2 * 3 * 16 * 48 * 10
    assert work.bytes_moved == 4 * (3 * 16 * (48 + 10) + 490)
    x = torch.zeros(2, 3, 32, 32)
    assert work_of(by_definition(converted), x).flops < work_of(dense_copy(converted), x).flops


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(OptionError, match="protocol 'tomorrow'"):
        units("tomorrow", MODEL, SIZES, "gonon", 0)
    with pytest.raises(OptionError, match="resnet18"):
        units("paper", "resnet18", {}, "gonon", 0)
