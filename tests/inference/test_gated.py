"""Gated feed-forward groups: proven by what flows where, fused alike, and left with the reason where something else happens."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import timm
import torch
from timm.layers.mlp import GluMlp, SwiGLU
from torch import Tensor, nn
from torch.nn import functional

import flysurgery
from flysurgery.inference import clock, measure_groups
from flysurgery.inference.find_groups import find_groups
from tests.inference.conftest import FFN_LAUNCHES
from tests.inference.models import SMALL, images, ready
from tests.support.tolerance import OF_DTYPE, assert_epilogue_comparable, assert_equal

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


@pytest.mark.parametrize("kind", MODULES)
@pytest.mark.parametrize("converted", [(), ("ffn_in",), ("ffn_out",), ("ffn_in", "ffn_out")], ids=str)
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
    assert report.restore() > 0
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


def test_what_others_use_is_left_with_the_reason() -> None:
    class Leaking(Written):
        def forward(self, x: Tensor) -> Tensor:
            gate, value = halves(self.up, x)
            return self.down(functional.silu(gate) * value) + value[..., :1]

    reasons = find_groups(ready(Alone(Leaking(lambda: torch.zeros(()))), convert=False), torch.randn(3, 5, WIDTH)).reasons
    assert [reason.code for _, reason in reasons.values()] == ["shared"]


def test_a_middle_part_is_no_half() -> None:
    model = ready(Alone(Written(split_at_a_third)), convert=False)
    assert find_groups(model, torch.randn(3, 5, WIDTH)).feed_forwards == {}


@pytest.mark.parametrize(("name", "layer"), [("eva02_base_patch14_224", "mlp.fc1_x"), ("vit_giant_patch14_dinov2", "mlp.act")])
def test_hooks_and_training_mode_leave_the_block_as_it_was(called: list[str], name: str, layer: str) -> None:
    model = ready(timm.create_model(name, **{**SMALL, "mlp_ratio": 2}))
    model.get_submodule(f"blocks.0.{layer}").register_forward_hook(lambda *_: None)
    model.get_submodule("blocks.1.mlp").train()
    report = flysurgery.optimize(model)
    reasons = {row.fqn: row.reason.code for row in report.rows if row.reason}
    assert (reasons["blocks.0.mlp.fc2"], reasons["blocks.1.mlp.fc2"]) == ("hooked", "training")


def test_an_active_dropout_is_no_group(called: list[str]) -> None:
    class Always(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return functional.dropout(x, 0.5, training=True)

    model = ready(timm.create_model("vit_giant_patch14_dinov2", **{**SMALL, "mlp_ratio": 2}))
    model.blocks[0].mlp.drop1 = Always()  # pyright: ignore[reportIndexIssue]
    fused = {row.fqn for row in flysurgery.optimize(model).fused}
    assert "blocks.0.mlp.fc2" not in fused
    assert "blocks.1.mlp.fc2" in fused


@pytest.mark.usefixtures("compilable")
@pytest.mark.parametrize("name", ["eva02_base_patch14_224", "vit_giant_patch14_dinov2"])
def test_compiled_whole(name: str) -> None:
    model = ready(timm.create_model(name, **{**SMALL, "depth": 1, "mlp_ratio": 2}))
    x = images(model)
    before = model(x)
    assert any(row.group == "ffn" for row in flysurgery.optimize(model).fused)
    with torch.no_grad():
        assert_equal(torch.compile(model, fullgraph=True, backend="eager")(x), before)


def test_choices_of_all_layers_of_a_block_are_timed_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock, "medians_ms", lambda ways, inputs, **_: tuple(1.0 for _ in ways))
    model = ready(timm.create_model("eva02_base_patch14_224", **{**SMALL, "depth": 1}), convert=False)
    groups = measure_groups(flysurgery.plan(model, "lowrank", roles=("ffn",)), model, torch.randn(2, 3, 32, 32), fused=True)
    assert [group.fqns for group in groups] == [tuple(f"blocks.0.mlp.{layer}" for layer in ("fc1_g", "fc1_x", "fc2"))]
    assert all(len(choice.architectures) == 3 for choice in groups[0].choices)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("convert", [False, True])
@pytest.mark.parametrize("name", ["eva02_tiny_patch14_224", "eva02_base_patch14_224", "vit_giant_patch14_dinov2"])
def test_on_a_gpu_whole_models_keep_their_outputs(monkeypatch: pytest.MonkeyPatch, name: str, convert: bool, dtype: torch.dtype) -> None:
    sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 192, "depth": 2, "num_heads": 3, "num_classes": 64}
    model = ready(timm.create_model(name, **sizes), convert=convert).cuda().to(dtype)  # pyright: ignore[reportArgumentType]
    x = torch.randn((64, 3, 32, 32), generator=torch.Generator().manual_seed(2)).cuda().to(dtype)
    monkeypatch.setattr(clock, "medians_ms", lambda ways, inputs, **_: (2.0, 1.0))  # whatever is faster here
    with torch.no_grad():
        truth, before = copy.deepcopy(model).double()(x.double()), model(x)
        report = flysurgery.optimize(model, x)
        assert sum(row.group == "ffn" for row in report.fused) == 2
        assert_epilogue_comparable(model(x), before, truth, OF_DTYPE[dtype])
        report.restore()
        assert_equal(model(x), before)
