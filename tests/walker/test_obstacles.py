"""Each reason against a replacement, on a module that has just that, and the switches that take one away."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn

from flysurgery.walker import Switch, walk
from tests.walker.toys import TOKENS, WIDTH, FusedAttention, MisnamedMlp, Stack, attend_by_thirds, codes, named, roles, tokens


def with_parts(model: nn.Module, **parts: Any) -> nn.Module:
    for name, part in parts.items():
        setattr(model, name, part)
    return model


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return 2 * super().forward(x)


class Renamed(nn.Linear):
    pass


class Regularized(MisnamedMlp):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.proj.weight.sum()


def reads_its_weight(self: Any, x: Tensor, fused: Tensor) -> Tensor:
    return attend_by_thirds(self, x, nn.functional.linear(x, self.apple.weight, None))


def patched() -> nn.Module:
    model = MisnamedMlp()
    model.qkv.forward = lambda input: nn.functional.linear(input, model.qkv.weight)
    return model


def tied() -> nn.Module:
    model = with_parts(MisnamedMlp(), qkv=nn.Linear(WIDTH, WIDTH), proj=nn.Linear(WIDTH, WIDTH))
    model.proj.weight = model.qkv.weight  # pyright: ignore
    return model


def hooked_attention() -> nn.Module:
    """An ``nn.MultiheadAttention`` that stays as it is."""
    model = nn.TransformerEncoderLayer(WIDTH, 3, 48, batch_first=True)
    model.self_attn.register_forward_hook(lambda *_: None)
    return model


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (FusedAttention, {}),
        (lambda: with_parts(MisnamedMlp(), qkv=Doubled(WIDTH, 3 * WIDTH), proj=Renamed(3 * WIDTH, WIDTH)), {"qkv": "custom-forward"}),
        (patched, {"qkv": "custom-forward"}),
        (lambda: FusedAttention(reads_its_weight), {"apple": "weight-read"}),
        (Regularized, {"proj": "weight-read"}),
        (tied, {"qkv": "tied", "proj": "tied"}),
        (lambda: nn.TransformerEncoderLayer(WIDTH, 3, 48, batch_first=True), {}),
        (
            hooked_attention,
            {"self_attn.in_proj_weight": "raw-weight"} | dict.fromkeys(("self_attn.out_proj", "linear1", "linear2"), "weight-read"),
        ),
    ],
)
def test_what_blocks_a_replacement(make: Callable[[], nn.Module], expected: dict[str, str]) -> None:
    model = make()
    assert codes(model, tokens()) == {name: (code,) for name, code in expected.items()}
    assert {*roles(model, tokens()).values()} in ({"qkv", "attn_out"}, {"ffn_in", "ffn_out"}, {"qkv", "attn_out", "ffn_in", "ffn_out"})
    assert all(target.blocked == (target.fqn in expected) for target in walk(model, tokens()))


@pytest.mark.parametrize("register", ["register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook"])
def test_hooks_block_and_do_not_run(register: str) -> None:
    seen: list[int] = []
    model = MisnamedMlp()
    getattr(model.qkv, register)(lambda *args: seen.append(1))
    assert codes(model, tokens()) == {"qkv": ("hooked",)}
    assert seen == []


def test_parametrized() -> None:
    model = MisnamedMlp().train()
    nn.utils.parametrizations.spectral_norm(model.qkv)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert codes(model, tokens()) == {"qkv": ("parametrized",)}
    assert roles(model, tokens()) == {"qkv": "ffn_in", "proj": "ffn_out"}
    # reading the weight in training mode would advance the power iteration
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_shared_modules_are_one_target() -> None:
    shared = MisnamedMlp()
    targets = named(Stack(shared, FusedAttention(), shared), tokens(7))
    twice = targets["blocks.0.qkv"]
    assert (twice.aliases, twice.calls, twice.rows, twice.role) == (("blocks.2.qkv",), 2, 2 * 2 * TOKENS, "ffn_in")
    assert twice.obstacles == ()
    assert "blocks.2.qkv" not in targets and targets["blocks.1.apple"].aliases == ()


def test_not_called() -> None:
    target = walk(with_parts(MisnamedMlp(), spare=nn.Linear(3, 4, bias=False)), tokens())[-1]
    assert (target.fqn, target.role, target.in_features, target.out_features, target.bias) == ("spare", "other", 3, 4, False)
    assert (target.calls, target.rows, target.obstacles[0].code, target.blocked) == (0, 0, "not-called", True)


def test_not_all_obstacles_block() -> None:
    targets = named(Stack(FusedAttention()), tokens(7))
    assert not targets["first"].blocked and not targets["last"].blocked
    narrow = with_parts(MisnamedMlp(), qkv=nn.Linear(WIDTH, 1), proj=nn.Linear(1, WIDTH))
    assert codes(narrow, tokens()) == {"qkv": ("rank-one",), "proj": ("rank-one",)}
    assert {*roles(narrow, tokens()).values()} == {"other"}


def test_pointwise_convolutions_are_linears_of_pixels() -> None:
    class Convolutions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down, self.wide = nn.Conv2d(8, 16, 1), nn.Conv2d(16, 8, 1), nn.Conv2d(8, 8, 3, padding=1)
            self.grouped, self.strided = nn.Conv2d(8, 8, 1, groups=2), nn.Conv2d(8, 8, 1, stride=2)
            self.hooked = nn.Conv2d(8, 8, 1)
            self.hooked.register_forward_hook(lambda *_: None)

        def forward(self, x: Tensor) -> Tensor:
            return self.strided(self.grouped(self.wide(self.hooked(x + self.down(self.up(x).relu())))))

    targets = named(Convolutions(), torch.zeros(2, 8, 4, 4))
    assert {fqn: (target.role, target.obstacles[-1].code) for fqn, target in targets.items()} == {
        "up": ("ffn_in", "conv1x1"),
        "down": ("ffn_out", "conv1x1"),
        "hooked": ("other", "hooked"),
    }
    up = targets["up"]
    assert (up.out_features, up.in_features, up.rows, up.blocked) == (16, 8, 2 * 4 * 4, True)
    at_one_pixel = codes(nn.Sequential(nn.Conv2d(8, 8, 1, stride=2)), torch.zeros(2, 8, 1, 1))
    assert "conv-stride" in at_one_pixel["0"]


@pytest.mark.parametrize("name", ["beit_base_patch16_224", "eva02_tiny_patch14_224"])
def test_a_switch_by_which_attention_calls_its_linear_takes_the_reason_away(name: str) -> None:
    model = timm.create_model(name, depth=1, embed_dim=48, num_heads=3, img_size=28 if "14" in name else 32)
    switched = {target.fqn: target.switches for target in walk(model) if target.switches}
    assert switched == {"blocks.0.attn.qkv": (Switch("blocks.0.attn", "qkv_bias_separate", True),)}
