"""Small models for surgery, and a check that a model is as it was."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import timm
import torch
import torchvision
from torch import Tensor, nn

from flysurgery.factors import factors_to_dense
from flysurgery.projection import project
from flysurgery.surgery import Plan, plan
from flysurgery.surgery.apply import check_plan
from flysurgery.walker import walk

Planned = Callable[..., Plan]
TINY: dict[str, Any] = {"img_size": 32, "depth": 2, "embed_dim": 64, "num_heads": 2}
WIDTH = 64
PADDING = torch.tensor([[False] * 6, [False] * 4 + [True] * 2, [False] * 5 + [True]])
"""Of three samples of six tokens."""


def torchvision_vit() -> nn.Module:
    sizes: dict[str, Any] = {"image_size": 32, "patch_size": 8, "num_layers": 2, "num_heads": 2, "hidden_dim": WIDTH, "mlp_dim": 128}
    return torchvision.models.VisionTransformer(num_classes=7, **sizes)


def encoder(**options: Any) -> nn.TransformerEncoder:
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 128, **{"dropout": 0.0, "batch_first": True} | options)
    return nn.TransformerEncoder(layer, 2)


def beit() -> nn.Module:
    """Its attention reads ``qkv.weight`` unless a switch is set."""
    return timm.create_model("beit_base_patch16_224", **TINY)


@pytest.fixture(scope="session")
def _vit() -> nn.Module:
    torch.manual_seed(3)
    return timm.create_model("vit_tiny_patch16_224", num_classes=7, **TINY)


@pytest.fixture
def vit(_vit: nn.Module) -> nn.Module:
    """A ViT of two blocks and width 64, random weights, in training mode."""
    return copy.deepcopy(_vit)


@pytest.fixture(scope="session")
def planned(_vit: nn.Module) -> Planned:
    """``plan`` of ``vit``, which is traced once."""
    return partial(plan, _vit, targets=walk(_vit))


@pytest.fixture(scope="session")
def vit_plan(planned: Planned) -> Plan:
    """The default plan of ``vit``: q, k, v, fc1 and fc2 of both blocks, Monarch of 4 blocks."""
    return planned()


@pytest.fixture(scope="session")
def many() -> Tensor:
    """60 images whose pixels hang together, so that layers' inputs have a decaying covariance."""
    noise = torch.randn(60, 3, 8, 8, generator=torch.Generator().manual_seed(5))
    return nn.functional.interpolate(noise, size=(32, 32), mode="bilinear")


@torch.no_grad()
def make_exact(plan: Plan, model: nn.Module) -> None:
    """Replace each planned weight by its projection, so that it is a product of factors up to its own rounding."""
    dense = check_plan(plan, model)
    for layer in plan.replaced:
        weight = dense[layer.fqn].weight.flatten(1)
        for part in layer.parts:
            if part.architecture is not None:
                rows = weight[part.start : part.stop]
                rows.copy_(factors_to_dense(project(rows.double(), part.architecture).factors))
