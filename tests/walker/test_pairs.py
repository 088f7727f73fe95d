"""Two linears are a pair only where the features between them may stand in any order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn
from torch.nn import functional

from flysurgery.walker import walk

WIDTH, HIDDEN = 8, 12


class Ffn(nn.Module):
    def __init__(self, between: Callable[[Tensor], Tensor] | nn.Module) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.between = between
        self.down = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.between(self.up(x)))


def pairs(model: nn.Module) -> dict[str, str]:
    return {target.fqn: target.pair for target in walk(model, torch.zeros(2, 5, WIDTH)) if target.pair is not None}


ANY_ORDER = {
    "gelu": functional.gelu,
    "dropout": nn.Sequential(nn.ReLU(inplace=True), nn.Dropout(0.5)),
    "square and scale": lambda x: 0.5 * torch.relu(x).square() + 1,
    "through other shapes": lambda x: functional.silu(x.reshape(-1, HIDDEN)).view(-1, 5, HIDDEN),
    "nothing": lambda x: x,
}
OWN_ORDER = {
    "norm": nn.LayerNorm(HIDDEN),
    "one threshold a feature": lambda x: torch.maximum(x, torch.arange(1.0, HIDDEN + 1)),
    "softmax": lambda x: x.softmax(-1),
    "scale of each feature": lambda x: x * torch.arange(1.0, HIDDEN + 1),
    "gate": lambda x: x * torch.sigmoid(x.mean(-1, keepdim=True)),
    "flip": lambda x: x.flip(-1),
    "features among tokens": lambda x: x.reshape(-1, HIDDEN, 5).relu().reshape(-1, 5, HIDDEN),
    "order of tokens": lambda x: functional.pad(x[..., 1:], (0, 1)),
}


@pytest.mark.parametrize("name", ANY_ORDER)
@torch.no_grad()
def test_element_wise_operators_make_a_pair_and_its_units_can_be_permuted(name: str) -> None:
    torch.manual_seed(0)
    model = Ffn(ANY_ORDER[name]).eval()
    assert pairs(model) == {"up": "down"}
    x, order = torch.randn(2, 5, WIDTH), torch.randperm(HIDDEN)
    before = model(x)
    for parameter in (model.up.weight, model.up.bias):
        parameter.copy_(parameter[order])
    model.down.weight.copy_(model.down.weight[:, order])
    assert float((model(x) - before).abs().max()) < 1e-6


class TwoReaders(Ffn):
    def forward(self, x: Tensor) -> Tensor:
        hidden = functional.gelu(self.up(x))
        return self.down(hidden) + hidden.mean(-1, keepdim=True)


class Twice(Ffn):
    def forward(self, x: Tensor) -> Tensor:
        other = self.down(x.repeat(1, 1, 2)[..., :HIDDEN])
        return self.down(functional.gelu(self.up(x))) + other


@pytest.mark.parametrize("model", [*(Ffn(each) for each in OWN_ORDER.values()), TwoReaders(functional.gelu), Twice(functional.gelu)])
def test_units_that_are_told_apart_or_read_elsewhere_or_come_from_elsewhere_make_no_pair(model: nn.Module) -> None:
    assert pairs(model) == {}


def test_the_feed_forward_blocks_of_a_vit_are_pairs_and_gated_ones_are_not() -> None:
    small: dict[str, Any] = {"img_size": 32, "patch_size": 16, "embed_dim": 32, "depth": 2, "num_heads": 2}
    vit = timm.create_model("vit_tiny_patch16_224", **small)
    assert {t.fqn: t.pair for t in walk(vit) if t.pair} == {f"blocks.{i}.mlp.fc1": f"blocks.{i}.mlp.fc2" for i in (0, 1)}
    gated = timm.create_model("eva02_tiny_patch14_224", img_size=28, patch_size=14, embed_dim=32, depth=1, num_heads=2)
    assert all(target.pair is None for target in walk(gated))
