"""Small models for surgery: a hand-made transformer block, and tiny timm and vit-pytorch ones."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import timm
import torch
from torch import Tensor, nn

from flysurgery.factors import factors_to_dense
from flysurgery.projection import project
from flysurgery.surgery import Plan, plan

TOKENS, WIDTH, HIDDEN, CLASSES = 8, 32, 64, 5


class Block(nn.Module):
    """Fused attention and an FFN, with a batch norm and a dropout, which an inference must leave alone."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.norm = nn.BatchNorm1d(TOKENS)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.drop = nn.Dropout(0.5)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        x = x + self.out(nn.functional.scaled_dot_product_attention(q, k, v))
        return x + self.down(self.drop(nn.functional.gelu(self.up(self.norm(x)))))


class Toy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


@pytest.fixture
def toy() -> nn.Module:
    torch.manual_seed(1)
    return Toy()


@pytest.fixture
def toy_input() -> Tensor:
    return torch.randn(2, TOKENS, WIDTH, generator=torch.Generator().manual_seed(2))


@pytest.fixture(scope="session")
def _vit() -> nn.Module:
    torch.manual_seed(3)
    return timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2, embed_dim=64, num_heads=2, num_classes=7)


@pytest.fixture
def vit(_vit: nn.Module) -> nn.Module:
    """A ViT of two blocks and width 64, random weights, in training mode."""
    return copy.deepcopy(_vit)


@pytest.fixture(scope="session")
def vit_plan(_vit: nn.Module) -> Plan:
    """The default plan of ``vit``: q, k, v, fc1 and fc2 of both blocks, Monarch of 4 blocks."""
    return plan(_vit)


@pytest.fixture
def many() -> Tensor:
    """60 images whose pixels hang together, so that layers' inputs have a decaying covariance."""
    noise = torch.randn(60, 3, 8, 8, generator=torch.Generator().manual_seed(5))
    return nn.functional.interpolate(noise, size=(32, 32), mode="bilinear")


@pytest.fixture
def images() -> Tensor:
    return torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(4))


@pytest.fixture
def make_exact() -> Callable[[Plan, nn.Module], None]:
    """Replaces each planned weight by its projection, so that it is a product of factors up to its own rounding."""

    @torch.no_grad()
    def make(plan: Plan, model: nn.Module) -> None:
        for layer in plan.replaced:
            weight = model.get_parameter(f"{layer.fqn}.weight").flatten(1)
            for part in layer.parts:
                if part.architecture is not None:
                    rows = weight[part.start : part.stop]
                    rows.copy_(factors_to_dense(project(rows.double(), part.architecture).factors))

    return make
