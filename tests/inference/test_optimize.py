"""Which groups are fused in models of each kind, that outputs stay, and the way back."""

from __future__ import annotations

import copy
import importlib
import io
from typing import Any

import pytest
import timm
import torch
from torch import nn

import flysurgery
from flysurgery.errors import InferenceError, SurgeryError, WalkError
from flysurgery.inference import clock
from flysurgery.inference.fused_modules import (
    AttentionStep,
    EmbeddingStep,
    FeedForwardStep,
    LayerNormStep,
    LinearResidualStep,
    NormLinearStep,
    PatchesStep,
)
from flysurgery.inference.standin import StandIn
from tests.inference.models import SMALL, WHOLE, images, ready
from tests.support.tolerance import assert_equal

TIMM = {"img_size": 32, "num_classes": 5}
MASKED = [name for name in WHOLE if name != "attention"]
SPLIT = [name for name in WHOLE if name != "norm_linear"]
WRITTEN = ["layer_norm", "layer_norm", *["norm_linear", "linear_residual", "ffn"] * 2]
VIT = {"image_size": 32, "patch_size": 8, "num_classes": 5, "dim": 48, "depth": 2, "heads": 2, "mlp_dim": 96, "dim_head": 24}


def build(name: str, options: dict[str, object]) -> nn.Module:
    if ":" not in name:
        return timm.create_model(name, **options)  # pyright: ignore[reportArgumentType]
    module, _, of = name.partition(":")
    return getattr(importlib.import_module(module), of)(**options)


@pytest.mark.parametrize(
    ("name", "options", "kernels", "left"),
    [
        ("vit_small_patch16_224", SMALL, WHOLE, set()),
        ("deit3_small_patch16_224", SMALL, WHOLE, set()),
        ("beit_base_patch16_224", SMALL, MASKED, {"inline"}),
        ("vit_small_patch16_224", {**SMALL, "act_layer": "gelu_tanh", "class_token": False, "global_pool": "avg"}, WHOLE, set()),
        ("eva02_tiny_patch14_224", SMALL, WHOLE, {"call-form"}),  # gate and value from one layer, and layer norms without a scale
        ("eva02_base_patch14_224", SMALL, SPLIT, {"norm-shared", "call-form"}),  # from two layers, and a norm before the last one
        ("vit_giant_patch14_dinov2", {**SMALL, "mlp_ratio": 2}, WHOLE, set()),
        (
            "swin_tiny_patch4_window7_224",
            {"img_size": 32, "window_size": 4, "embed_dim": 24, "depths": (2,), "num_heads": (2,), "num_classes": 5},
            ["patch_embedding", "layer_norm", *["layer_norm", "ffn"] * 2, "layer_norm"],
            {"no-norm", "no-residual"},
        ),
        ("vit_pytorch.vit:ViT", VIT, WRITTEN, set()),
        ("vit_pytorch.simple_vit:SimpleViT", VIT, WRITTEN, set()),
    ],
)
def test_groups_are_found_and_outputs_stay(
    called: list[str], name: str, options: dict[str, object], kernels: list[str], left: set[str]
) -> None:
    model = ready(build(name, options))
    x = images(model)
    before, names, modules = model(x), list(model.state_dict()), list(model.modules())
    report = flysurgery.optimize(model)
    assert not called  # nothing is measured here
    # the stand-ins are made of the same operators in the same order, so not a bit differs
    assert_equal(model(x), before)
    assert called == kernels
    assert {row.reason.code for row in report.rows if row.reason is not None} == left
    assert list(model.state_dict()) == names
    assert report.restore() > 0
    assert list(model.modules()) == modules
    assert_equal(model(x), before)
    assert called == kernels


@pytest.mark.parametrize("exclude", [".*", r"blocks\.1"])
def test_layers_may_be_dense_or_mixed(called: list[str], exclude: str) -> None:
    model = ready(timm.create_model("vit_tiny_patch16_224", **SMALL), convert=False)
    if exclude != ".*":
        flysurgery.convert(model, roles=("ffn",), exclude=exclude, nblocks=4)
    x = images(model)
    before = model(x)
    report = flysurgery.optimize(model)
    assert_equal(model(x), before)
    assert called == WHOLE
    assert len(report.fused) == len(report.rows) == 11


def test_linear_layers_of_other_classes_are_left_with_the_reason(called: list[str]) -> None:
    class Other(nn.Linear):
        pass

    model = ready(timm.create_model("vit_tiny_patch16_224", **SMALL))
    model.blocks[0].attn.proj = Other(48, 48).eval()  # pyright: ignore
    report = flysurgery.optimize(model)
    assert {row.fqn: row.reason.code for row in report.rows if row.reason} == {"blocks.0.attn.proj": "no-kernel"}
    assert "a class that the kernels do not know" in str(report)


def test_layers_with_a_forward_of_their_own_are_left(called: list[str]) -> None:
    """One that reads another weight looks like any linear in a trace."""
    model = ready(timm.create_model("vit_tiny_patch16_224", **SMALL), convert=False)
    weight, layer, patches = torch.randn(192, 48), model.get_submodule("blocks.0.mlp.fc1"), model.get_submodule("patch_embed.proj")
    layer.forward = lambda x: nn.functional.linear(x, weight)  # pyright: ignore[reportAttributeAccessIssue]
    patches.forward = lambda x: nn.functional.conv2d(x, patches.weight.flip(0), stride=8)  # pyright: ignore
    x = images(model)
    before = model(x)
    report = flysurgery.optimize(model)
    assert_equal(model(x), before)
    assert {row.fqn for row in report.rows if row.reason} == {"blocks.0.mlp.fc2", "patch_embed.proj", "_pos_embed"}


def test_training_mode_and_hooks_leave_a_group_as_it_was(called: list[str]) -> None:
    model = ready(timm.create_model("vit_tiny_patch16_224", **SMALL))
    model.blocks[0].mlp.train()  # pyright: ignore[reportIndexIssue]
    model.blocks[1].norm1.register_forward_hook(lambda *_: None)  # pyright: ignore[reportIndexIssue]
    report = flysurgery.optimize(model)
    reasons = {row.fqn: row.reason.code for row in report.rows if row.reason}
    assert reasons == {
        f"blocks.{index}.{name}": code
        for index, code in ((0, "training"), (1, "hooked"))
        for name in ("attn.qkv", "attn", "attn.proj", "mlp.fc2")
    }


def test_hooks_set_later_and_training_mode_get_the_own_modules(called: list[str]) -> None:
    model = ready(timm.create_model("vit_tiny_patch16_224", **SMALL))
    x = images(model)
    before = model(x)
    seen: list[torch.Tensor] = []
    expected: list[torch.Tensor] = []
    norm = model.get_submodule("blocks.0.norm2")
    handle = norm.register_forward_hook(lambda module, args, result: expected.append(result))
    model(x)
    handle.remove()
    flysurgery.optimize(model)
    handle = model.get_submodule("blocks.0.norm2").register_forward_hook(lambda module, args, result: seen.append(result))
    assert_equal(model(x), before)
    assert_equal(seen[0], expected[0])
    assert called == ["patch_embedding", "norm_linear", "attention", "linear_residual", "ffn", "layer_norm"]
    handle.remove()
    called.clear()
    model.train()
    model(x)
    assert called == []
    model.eval()
    assert_equal(model(x), before)
    assert called == WHOLE


def test_a_hook_on_what_was_fused_runs_once_and_stays_after_restore(called: list[str]) -> None:
    model = ready(timm.create_model("vit_tiny_patch16_224", **SMALL))
    x, seen = images(model), []
    before = model(x)
    flysurgery.optimize(model)
    handle = model.get_submodule("blocks.0").register_forward_hook(lambda module, args, result: seen.append(result))
    assert_equal(model(x), before)
    assert called == ["patch_embedding", "norm_linear", "attention", "linear_residual", "ffn", "layer_norm"]
    flysurgery.restore(model)
    assert_equal(model(x), before)
    assert_equal(seen[0], seen[1])
    handle.remove()
    model(x)
    assert len(seen) == 2


def test_part_of_an_optimized_model_is_optimized_and_can_be_restored(called: list[str]) -> None:
    model = ready(timm.create_model("vit_tiny_patch16_224", **SMALL))
    flysurgery.optimize(model)
    blocks = nn.Sequential(*model.get_submodule("blocks").children())
    x = torch.randn(2, 17, 48)
    before = blocks(x)
    with pytest.raises(InferenceError, match="optimized already"):
        flysurgery.optimize(blocks, x)
    assert flysurgery.restore(blocks) == 2
    called.clear()
    assert_equal(blocks(x), before)
    assert not called
    assert flysurgery.restore(model) == 5


def test_a_hook_on_a_norm_whose_work_was_moved_sees_its_result(called: list[str]) -> None:
    model = ready(build("vit_pytorch.vit:ViT", VIT))
    x = images(model)
    seen: list[torch.Tensor] = []
    name = "transformer.layers.0.0.norm"
    handle = model.get_submodule(name).register_forward_hook(lambda module, args, result: seen.append(result))
    before = model(x)
    handle.remove()
    flysurgery.optimize(model)
    model.get_submodule(name).register_forward_hook(lambda module, args, result: seen.append(result))
    assert_equal(model(x), before)
    assert_equal(seen[1], seen[0])


def test_an_active_dropout_is_no_group(called: list[str]) -> None:
    class Always(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.dropout(x, 0.5, training=True)

    model = ready(timm.create_model("vit_tiny_patch16_224", **SMALL))
    model.blocks[0].mlp.drop1 = Always()  # pyright: ignore[reportIndexIssue]
    model.blocks[1].drop_path2 = Always()  # pyright: ignore[reportIndexIssue]
    report = flysurgery.optimize(model)
    fused = {row.fqn for row in report.fused}
    assert "blocks.0.mlp.fc2" not in fused
    assert "blocks.1.attn.proj" not in fused
    step = model.get_submodule("blocks.1.mlp")
    assert isinstance(step, StandIn)  # without the dropout and the sum behind it


def test_copies_pickles_and_state_dicts_follow(called: list[str]) -> None:
    model = ready(timm.create_model("vit_tiny_patch16_224", **SMALL))
    x = images(model)
    plain = copy.deepcopy(model)
    flysurgery.optimize(model)
    double = copy.deepcopy(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    read = torch.load(file, weights_only=False)
    changed = {name: 0.5 * tensor for name, tensor in model.state_dict().items()}
    before = plain(x)
    plain.load_state_dict(changed)
    model.load_state_dict(changed, assign=True)
    for each, expected in ((model, plain(x)), (double, before), (read, before)):
        called.clear()
        assert_equal(each(x), expected)
        assert called == WHOLE
        assert flysurgery.restore(each) == 5
        assert_equal(each(x), expected)
    half = model.bfloat16()
    flysurgery.optimize(half)
    assert_equal(half(x.bfloat16()), plain.bfloat16()(x.bfloat16()))


def test_what_would_pull_the_layers_away_is_refused(called: list[str]) -> None:
    model = ready(timm.create_model("vit_tiny_patch16_224", **SMALL))
    flysurgery.optimize(model)
    with pytest.raises(InferenceError, match="optimized already"):
        flysurgery.optimize(model)
    for change in (flysurgery.densify, flysurgery.convert):
        with pytest.raises(SurgeryError, match="restore"):
            change(model)
    assert flysurgery.restore(model) == 5
    assert flysurgery.restore(model) == 0
    flysurgery.densify(model)


def test_a_slower_kernel_is_left_with_both_times(called: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock, "medians_ms", lambda ways, inputs, **_: (1.0, 1.5))
    model = ready(timm.create_model("vit_tiny_patch16_224", **SMALL))
    report = flysurgery.optimize(model)
    assert report.fused == ()
    assert {row.reason.code for row in report.rows if row.reason} == {"slower"}
    assert (report.rows[0].plain_ms, report.rows[0].fused_ms) == (1.0, 1.5)
    assert not any(isinstance(module, StandIn) for module in model.modules())


def test_times_are_those_of_the_given_batch(called: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    shapes: set[tuple[int, ...]] = set()

    def medians(ways: tuple[object, ...], inputs: tuple[torch.Tensor, ...], **_: object) -> tuple[float, float]:
        shapes.update(tuple(each.shape) for each in inputs)
        return 2.0, 1.0

    monkeypatch.setattr(clock, "medians_ms", medians)
    model = ready(timm.create_model("vit_tiny_patch16_224", **SMALL))
    flysurgery.optimize(model, images(model, 5))
    assert shapes == {(5, 3, 32, 32), (5, 2, 17, 24), (5 * 17, 48), (5, 17, 48)}


def test_what_makes_the_whole_model_slower_is_taken_back_the_least_gain_first(called: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups gain a quarter of a millisecond to 4 by themselves; together they lose as long as more than two kinds are fused."""
    gains = {
        LayerNormStep: 0.25,
        AttentionStep: 0.5,
        NormLinearStep: 1.0,
        LinearResidualStep: 2.0,
        PatchesStep: 3.0,
        EmbeddingStep: 3.5,
        FeedForwardStep: 4.0,
    }
    model = ready(timm.create_model("vit_tiny_patch16_224", **SMALL))
    x = images(model)
    before = model(x)

    def medians(ways: tuple[Any, ...], inputs: tuple[torch.Tensor, ...], **_: object) -> tuple[float, float]:
        if ways[0] is not model:
            return 10.0, 10.0 - gains[type(ways[0].__self__)]
        called.clear()
        assert_equal(ways[1](*inputs), ways[0](*inputs))
        return 10.0, 11.0 if len(set(called)) > 2 else 10.0

    monkeypatch.setattr(clock, "medians_ms", medians)
    report = flysurgery.optimize(model, x)
    assert report.whole_ms == (10.0, 10.0) and "takes 10 ms now" in str(report)
    assert {row.group for row in report.fused} == {"patches", "ffn"}
    assert {row.group for row in report.rows if row.reason and row.reason.code == "slower-model"} == {
        "qkv",
        "attention",
        "attn_out",
        "norm",
    }
    called.clear()
    assert_equal(model(x), before)
    assert called == ["patch_embedding", "ffn", "ffn"]
    monkeypatch.setattr(clock, "medians_ms", lambda ways, inputs, **_: (1.0, 2.0) if isinstance(ways[0], nn.Module) else (2.0, 1.0))
    flysurgery.restore(model)
    report = flysurgery.optimize(model, x)
    assert not report.fused and report.whole_ms is None
    assert not any(isinstance(module, StandIn) for module in model.modules())


def test_without_kernels_only_patches_by_themselves_can_be_fused() -> None:
    model = ready(timm.create_model("vit_tiny_patch16_224", **SMALL))
    report = flysurgery.optimize(model)
    assert {row.group for row in report.rows if row.reason and row.reason.code == "no-kernel"} == {
        "qkv",
        "attention",
        "attn_out",
        "ffn",
        "norm",
        "patches",
    }
    times = next(row for row in report.rows if row.fqn == "patch_embed.proj")
    assert times.plain_ms and times.fused_ms
    if report.fused:
        assert report.whole_ms is not None and report.whole_ms[1] <= report.whole_ms[0]


def test_images_of_other_channels_meet_the_models_own_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock, "medians_ms", lambda ways, inputs, **_: (2.0, 1.0))
    model = ready(timm.create_model("vit_tiny_patch16_224", **SMALL))
    flysurgery.optimize(model)
    with pytest.raises(RuntimeError, match="to have 3 channels, but got 1 channels"):
        model(torch.zeros(2, 1, 32, 32))


@pytest.mark.parametrize(
    ("example", "words"),
    [
        (torch.zeros(0, 3, 32, 32), "the example of VisionTransformer is empty; give one with at least one sample"),
        (torch.zeros(2, 3, 31, 31), "Input height"),
        (torch.zeros(2, 3, 32, 32).half(), "Half"),
        ("digits", "'str' object"),
    ],
)
def test_an_example_that_the_model_does_not_take_changes_nothing(example: Any, words: str) -> None:
    model = ready(timm.create_model("vit_tiny_patch16_224", **SMALL))
    modules = list(model.modules())
    with pytest.raises(WalkError, match=words):
        flysurgery.optimize(model, example)
    assert list(model.modules()) == modules


def test_what_cannot_be_optimized_is_refused_in_one_sentence() -> None:
    model = ready(timm.create_model("vit_tiny_patch16_224", **SMALL), convert=False)
    in_place = copy.deepcopy(model)
    in_place.compile()
    holding = copy.deepcopy(model)
    holding.blocks[1] = torch.compile(holding.get_submodule("blocks.1"))  # pyright: ignore
    others: list[tuple[Any, str]] = [
        (torch.compile(model), "the model is compiled already"),
        (in_place, "the model is compiled already"),
        (holding, "its blocks.1 is compiled already"),
        ("vit_tiny_patch16_224", "expected a torch.nn.Module to optimize, got str"),
    ]
    for other, words in others:
        with pytest.raises(InferenceError, match=words):
            flysurgery.optimize(other)


def test_a_forward_that_asks_for_values_is_refused_in_one_sentence() -> None:
    class Picking(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return super().forward(input[input[:, 0] > 0])

    with pytest.raises(WalkError, match=r"Picking cannot be walked, because it does not run without data: aten\.nonzero"):
        flysurgery.optimize(Picking(3, 3).eval(), torch.randn(5, 3))
