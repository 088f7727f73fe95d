"""Gated feed-forward groups: proven by what flows where, fused alike, and left with the reason where something else happens."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from timm.layers.mlp import GluMlp, SwiGLU
from torch import Tensor, nn
from torch.nn import functional

import flysurgery
from flysurgery.inference import clock, measure_groups
from flysurgery.inference.find_groups import find_groups
from tests.inference.conftest import FFN_LAUNCHES
from tests.inference.models import keeps_outputs, ready, small
from tests.support.tolerance import assert_equal

WIDTH, HIDDEN = 16, 32


class Alone(nn.Module):
    """A norm, a feed-forward module, and a residual."""

    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(WIDTH), mlp

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


class Written(nn.Module):
    """A feed-forward module whose hidden units are what ``hidden`` makes of the outputs of one layer and, where it has it, of another."""

    def __init__(self, hidden: Callable[..., Tensor], outputs: int = 2 * HIDDEN) -> None:
        super().__init__()
        self.up, self.other, self.down = nn.Linear(WIDTH, outputs), nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.hidden = hidden

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.hidden(self.up, self.other, x))


def halves(up: nn.Module, x: Tensor) -> tuple[Tensor, ...]:
    return up(x).chunk(2, dim=-1)


def split_at_a_third(up: nn.Module, other: nn.Module, x: Tensor) -> Tensor:
    _, gate, value = up(x).split((HIDDEN // 2, HIDDEN, HIDDEN // 2), dim=-1)
    return functional.silu(gate) * other(x) + value.sum()


def packed(gate: int) -> nn.Module:
    return GluMlp(WIDTH, 2 * HIDDEN, act_layer=nn.SiLU, gate_last=bool(gate))


MODULES = {
    "two layers": lambda: SwiGLU(WIDTH, HIDDEN),
    "two layers and a norm": lambda: SwiGLU(WIDTH, HIDDEN, norm_layer=nn.LayerNorm),
    "halves, the gate first": lambda: packed(0),
    "halves, the gate last": lambda: packed(1),
    "halves and a norm": lambda: GluMlp(WIDTH, 2 * HIDDEN, act_layer=nn.GELU, norm_layer=nn.LayerNorm),
    "halves by split": lambda: Written(
        lambda up, other, x: (lambda a, b: b * functional.gelu(a, approximate="tanh"))(*up(x).split(HIDDEN, dim=-1))
    ),
}


@pytest.mark.parametrize("converted", [(), ("ffn_in",), ("ffn_in", "ffn_out")], ids=str)
@pytest.mark.parametrize("kind", MODULES)
def test_each_form_is_fused_and_outputs_stay(called: list[str], kind: str, converted: tuple[str, ...]) -> None:
    model, x = ready(Alone(MODULES[kind]()), convert=False), torch.randn(3, 5, WIDTH)
    if converted:
        flysurgery.convert(model, "monarch", roles=converted, nblocks=4, example=x)
    before = model(x)
    report = flysurgery.optimize(model, x)
    assert [row.group for row in report.fused] == ["ffn"]
    assert report.fused[0].launches == FFN_LAUNCHES
    assert " | ".join(FFN_LAUNCHES) in str(report)
    assert_equal(model(x), before)
    assert called == ["ffn"]


@pytest.mark.parametrize(
    ("hidden", "outputs", "code"),
    [
        (lambda up, other, x: functional.silu(halves(up, x)[0]) * halves(up, x)[1], 2 * HIDDEN, "gated"),  # the layer runs twice
        (lambda up, other, x: functional.silu(up(x)) * other(2 * x), HIDDEN, "gated"),  # of other inputs
        (lambda up, other, x: functional.silu(up(x)) * x.repeat(1, 1, 2), HIDDEN, "gated"),
        (lambda up, other, x: functional.silu(up(x)) * functional.silu(other(x)), HIDDEN, "gated"),
        (lambda up, other, x: functional.silu(up(x)[..., :HIDDEN]) * up(x)[..., :1], 2 * HIDDEN, "gated"),
        (lambda up, other, x: functional.glu(up(x)), 2 * HIDDEN, "activation"),
        (lambda up, other, x: (lambda a: a * torch.sigmoid(1.702 * a))(up(x)), HIDDEN, "activation"),  # QuickGELU
        (lambda up, other, x: (lambda a, b: functional.silu(a) * b + b.mean())(*halves(up, x)), 2 * HIDDEN, "activation"),
        (lambda up, other, x: (lambda a, b: functional.silu(a) * functional.dropout(b, 0.5))(*halves(up, x)), 2 * HIDDEN, "gated"),
    ],
)
def test_what_is_something_else_is_left_with_the_reason(called: list[str], hidden: Callable[..., Tensor], outputs: int, code: str) -> None:
    model, x = ready(Alone(Written(hidden, outputs)), convert=False), torch.randn(3, 5, WIDTH)
    assert [reason.code for _, reason in find_groups(model, x).reasons.values()] == [code]
    assert {row.group for row in flysurgery.optimize(model, x).fused} == {"norm"}


def test_what_others_use_and_middle_parts_are_no_groups() -> None:
    class Leaking(Written):
        def forward(self, x: Tensor) -> Tensor:
            gate, value = halves(self.up, x)
            return self.down(functional.silu(gate) * value) + value[..., :1]

    x = torch.randn(3, 5, WIDTH)
    reasons = find_groups(ready(Alone(Leaking(lambda: torch.zeros(()))), convert=False), x).reasons
    assert [reason.code for _, reason in reasons.values()] == ["shared"]
    assert find_groups(ready(Alone(Written(split_at_a_third)), convert=False), x).feed_forwards == {}


def test_choices_of_all_layers_of_a_block_are_timed_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock, "medians_ms", lambda ways, inputs, **_: tuple(1.0 for _ in ways))
    model = small("eva02_base_patch14_224", convert=False, depth=1)
    groups = measure_groups(flysurgery.plan(model, "lowrank", roles=("ffn",)), model, torch.randn(2, 3, 32, 32), fused=True)
    assert [group.fqns for group in groups] == [tuple(f"blocks.0.mlp.{layer}" for layer in ("fc1_g", "fc1_x", "fc2"))]
    assert all(len(choice.architectures) == 3 for choice in groups[0].choices)


@pytest.mark.gpu
@pytest.mark.usefixtures("faster")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("convert", [False, True])
@pytest.mark.parametrize("name", ["eva02_tiny_patch14_224", "eva02_base_patch14_224", "vit_giant_patch14_dinov2"])
def test_on_a_gpu_whole_models_keep_their_outputs(name: str, convert: bool, dtype: torch.dtype) -> None:
    model = small(name, convert=convert, embed_dim=192, num_heads=3, num_classes=64).cuda().to(dtype)
    x = torch.randn((64, 3, 32, 32), generator=torch.Generator().manual_seed(2)).cuda().to(dtype)
    assert sum(row.group == "ffn" for row in keeps_outputs(model, x).fused) == 2
