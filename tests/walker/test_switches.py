"""Parents that read their linear's weight unless an attribute makes them call it."""

from __future__ import annotations

from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn

from flysurgery.walker import Switch, walk
from tests.walker.toys import WIDTH, FusedAttention, codes, named, tokens


class Parent(FusedAttention):
    """Adds a bias of its own: within the product, which reads the weight, or after calling the module, where ``honest``."""

    def __init__(self, *, honest: bool = True):
        super().__init__()
        self.apple = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.own_bias = nn.Parameter(torch.zeros(3 * WIDTH))
        self.qkv_bias_separate = False
        self.honest = honest

    def forward(self, x: Tensor) -> Tensor:
        if self.qkv_bias_separate and self.honest:
            fused = self.apple(x)
            fused += self.own_bias
        else:
            fused = nn.functional.linear(x, self.apple.weight, self.own_bias)
        q, k, v = fused.chunk(3, -1)
        return self.pear(nn.functional.scaled_dot_product_attention(q, k, v))


@pytest.mark.parametrize("on", [False, True])
def test_a_switch_replaces_the_obstacle(on: bool) -> None:
    model = Parent()
    model.qkv_bias_separate = on
    apple, pear = walk(model, tokens())
    assert (apple.role, apple.obstacles, apple.switches) == ("qkv", (), (Switch("", "qkv_bias_separate", True),))
    assert apple.split is not None and pear.switches == ()
    assert model.qkv_bias_separate is on


def test_a_switch_that_does_not_keep_its_promise() -> None:
    model = Parent(honest=False)
    assert codes(model, tokens()) == {"apple": ("weight-read",)} and named(model, tokens())["apple"].switches == ()


def test_no_switch_where_the_module_is_called_anyway() -> None:
    model = timm.create_model("beit_base_patch16_224", depth=1, embed_dim=48, num_heads=3, img_size=32)
    assert "blocks.0.attn.qkv" not in codes(model)
    for block in model.blocks:  # pyright: ignore[reportGeneralTypeIssues]
        block.attn.q_bias = block.attn.k_bias = block.attn.v_bias = None
    without_bias = named(model)["blocks.0.attn.qkv"]
    assert (without_bias.switches, without_bias.obstacles) == ((), ())


@pytest.mark.parametrize(
    ("name", "options", "fqn"),
    [
        ("beit_base_patch16_224", {"depth": 1, "embed_dim": 48, "num_heads": 3, "img_size": 32}, "blocks.0.attn"),
        (
            "swinv2_tiny_window8_256",
            {"embed_dim": 24, "depths": (1,), "num_heads": (2,), "img_size": 32, "window_size": 4},
            "layers.0.blocks.0.attn",
        ),
        ("eva02_tiny_patch14_224", {"depth": 1, "embed_dim": 48, "num_heads": 3, "img_size": 28}, "blocks.0.attn"),
    ],
)
def test_families_of_timm(name: str, options: dict[str, Any], fqn: str) -> None:
    switched = {target.fqn: target.switches for target in walk(timm.create_model(name, **options)) if target.switches}
    assert switched == {f"{fqn}.qkv": (Switch(fqn, "qkv_bias_separate", True),)}
