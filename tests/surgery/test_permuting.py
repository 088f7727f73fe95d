"""Features in a new order: the dense model computes the same, errors fall, and the report says what was won and what was tied."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn
from vit_pytorch import ViT

from flysurgery.calibration import Inputs, collect, samples_of
from flysurgery.checkpoint import load, save
from flysurgery.surgery import Plan, Report, apply, densify, plan
from flysurgery.surgery.permuting import HIDDEN_UNITS, INDIFFERENT, SEPARATE, Permuted, permute, shared_features
from flysurgery.walker import HEADS, QUERY_KEY, VALUE
from tests.surgery.conftest import inputs_of, interrupt_at, unchanged

ALL = ("qkv", "attn_out", "ffn_in", "ffn_out")


@pytest.fixture
def many(many: Tensor) -> Tensor:
    return many[:40]


def permuted(made: Plan, model: nn.Module, images: Tensor) -> Permuted:
    calls = {layer.fqn: layer.calls for layer in made.replaced}
    inputs = {fqn: Inputs(found, found) for fqn, found in collect(model, calls, images.split(8)).items()}
    return permute(shared_features(made, model, samples_of(images)), made, model, made.replaced, inputs)


def with_linears(model: nn.Module, linears: dict[str, nn.Linear]) -> nn.Module:
    new = copy.deepcopy(model)
    for fqn, linear in linears.items():
        parent, _, name = fqn.rpartition(".")
        setattr(new.get_submodule(parent), name, linear)
    return new


TIMM: dict[str, Any] = {"img_size": 32, "patch_size": 8, "embed_dim": 48, "depth": 1, "num_heads": 3, "num_classes": 5}
WINDOWS: dict[str, Any] = {"img_size": 32, "depths": (1,), "num_heads": (3,), "embed_dim": 48, "window_size": 4, "num_classes": 5}
SIZES: dict[str, Any] = {"image_size": 32, "patch_size": 8, "num_classes": 5, "dim": 48, "depth": 1, "heads": 3, "mlp_dim": 96}

MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[str, ...]]] = {
    "vit": (lambda: timm.create_model("vit_tiny_patch16_224", **TIMM), ()),
    "norms of query and key": (lambda: timm.create_model("vit_tiny_patch16_224", qk_norm=True, **TIMM), (QUERY_KEY,)),
    "swin": (lambda: timm.create_model("swin_tiny_patch4_window7_224", **WINDOWS), (HEADS,)),
    "cait": (lambda: timm.create_model("cait_xxs24_224", **TIMM), (HEADS,)),
    "vit-pytorch": (lambda: ViT(dim_head=16, **SIZES), ()),
}


@pytest.mark.parametrize(("name", "roles"), [("vit", None), *((name, ALL) for name in MODELS)])
@torch.no_grad()
def test_the_dense_model_in_the_new_order_computes_the_same(name: str, roles: tuple[str, ...] | None, many: Tensor) -> None:
    torch.manual_seed(0)
    make, tied = MODELS[name]
    model = make().eval()
    found = permuted(plan(model, roles=roles), model, many)
    heads = [each for each in found.outcomes if each.what == HEADS]
    assert heads and all(each.moved and set(each.tied) == set(tied) for each in heads)
    new = with_linears(model, found.linears)
    moved = [fqn for fqn in found.linears if not torch.equal(new.get_parameter(f"{fqn}.weight"), model.get_parameter(f"{fqn}.weight"))]
    assert sum(fqn.endswith(("qkv", "attn.proj", "to_out.0")) for fqn in moved) == 2
    right = model(many)
    assert float((new(many) - right).abs().max()) < 1e-5 * float(right.abs().max())
    for fqn, x in inputs_of(new, list(found.inputs), many).items():
        assert torch.allclose(found.inputs[fqn].fit.mean, x.flatten(0, -2).double().mean(0), atol=1e-5)


@pytest.mark.parametrize("sequential", [False, True])
def test_errors_fall_in_each_group_and_the_report_says_by_how_much(vit: nn.Module, many: Tensor, sequential: bool) -> None:
    made = plan(vit, roles=ALL)
    stayed, moved = copy.deepcopy(vit), copy.deepcopy(vit)
    before = {row.fqn: row.calibration for row in apply(made, stayed, calibrate=many, sequential=sequential).replaced}
    report = apply(made, moved, calibrate=many, sequential=sequential, permute=True)
    after = {row.fqn: row.calibration for row in report.replaced}
    assert sorted(each.what for each in report.permutations) == [HEADS] * 2 + [HIDDEN_UNITS] * 2
    for each in report.permutations:
        assert each.moved and not each.tied
        assert sum(layer.after**2 for layer in each.layers) < sum(layer.before**2 for layer in each.layers)
        assert all(after[layer.fqn].permuted for layer in each.layers)  # type: ignore[union-attr]
        names = [layer.fqn for layer in each.layers]
        if "blocks.0" in names[0]:
            fits = [sum(found[fqn].fit_error ** 2 for fqn in names) for found in (before, after)]  # type: ignore[union-attr]
            assert fits[1] < fits[0]
    assert "in a new order" in str(report) and "2 of 2" in str(report)
    document = report.to_json()["permutations"]
    assert {each["what"] for each in document} == {HIDDEN_UNITS, HEADS} and all(each["moved"] for each in document)


def test_a_model_with_permuted_heads_is_saved_and_densified_as_it_is(vit: nn.Module, vit_plan: Plan, many: Tensor, tmp_path: Path) -> None:
    report = apply(vit_plan, vit, calibrate=many, permute=True)
    assert "blocks.0.attn.proj" not in [row.fqn for row in report.replaced]
    save(vit.eval(), tmp_path / "o", report=report)
    with torch.no_grad():
        right = vit(many)
        assert torch.equal(load(tmp_path / "o").eval()(many), right)
        densify(vit)
        assert torch.allclose(vit(many), right, rtol=1e-3, atol=1e-5)


def test_what_fails_later_leaves_dense_layers_in_their_own_order(vit: nn.Module, vit_plan: Plan, many: Tensor) -> None:
    stop = interrupt_at(lambda _, name: name == "blocks.1.mlp.fc2")
    with unchanged(vit), pytest.raises(KeyboardInterrupt):
        apply(vit_plan, vit, calibrate=many, sequential=True, permute=True, progress=stop)


def tied(report: Report, what: str) -> list[set[str]]:
    return [set(each.tied.values()) for each in report.permutations if each.what == what]


def test_features_without_an_order_of_their_own_stay_and_the_report_says_why(vit: nn.Module, many: Tensor) -> None:
    low_rank = apply(plan(vit, "lowrank"), copy.deepcopy(vit), calibrate=many, permute=True)
    assert not any(each.moved for each in low_rank.permutations)
    assert tied(low_rank, HEADS) == tied(low_rank, HIDDEN_UNITS) == [{INDIFFERENT}] * 2
    assert "no order is better" in str(low_rank)
    whole = apply(plan(vit, include=r"attn\.qkv", patterns="(1,48,16,4),(4,16,16,1)"), vit, calibrate=many, permute=True)
    assert [set(each.tied) for each in whole.permutations] == [{HEADS, QUERY_KEY, VALUE}] * 2
    assert "does not have these features for itself" in str(whole)
    model = ViT(dim_head=16, **SIZES)  # whose names put the output projection into a block of its own
    made = plan(model, roles=("qkv", "attn_out"))
    assert SEPARATE in tied(apply(made, model, calibrate=many, sequential=True, permute=True), HEADS)[0]


def test_one_layer_of_a_block_takes_the_dense_other_with_it(vit: nn.Module, many: Tensor) -> None:
    dense = copy.deepcopy(vit)
    report = apply(plan(vit, roles=("ffn_out",)), vit, calibrate=many, permute=True)
    assert [(each.what, each.moved, len(each.layers)) for each in report.permutations] == [(HIDDEN_UNITS, True, 1)] * 2
    old, new = (model.get_parameter("blocks.0.mlp.fc1.weight") for model in (dense, vit))
    assert not torch.equal(old, new) and torch.equal(old.sum(1).sort().values, new.sum(1).sort().values)
