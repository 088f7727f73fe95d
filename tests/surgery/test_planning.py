"""From a model to a plan, through the walker: which layers, which architectures, and how the model is built again."""

from __future__ import annotations

import json
from typing import Any

import pytest
import timm
import torch
import vit_pytorch
from timm.models.mlp_mixer import MlpMixer
from torch import Tensor, nn

from flysurgery.errors import OptionError, PatternError, PlanError, SelectionError, SurgeryError
from flysurgery.patterns import Architecture, gonon, low_rank, monarch
from flysurgery.surgery import LayerPlan, Plan, Reason, apply, densify, plan
from flysurgery.surgery.base import find_base
from flysurgery.surgery.planning import Rule, read_architectures
from tests.surgery.conftest import TINY, beit, unchanged


def layers(of: Plan) -> dict[str, LayerPlan]:
    return {layer.fqn: layer for layer in of.layers}


def names(of: Plan) -> set[str]:
    return {layer.fqn for layer in of.replaced}


def blocks(*of_block: str) -> set[str]:
    return {f"blocks.{i}.{name}" for i in (0, 1) for name in of_block}


def test_the_default_plan_of_a_timm_vit(vit: nn.Module) -> None:
    with unchanged(vit):
        made = plan(vit)
    found = layers(made)
    assert names(made) == blocks("attn.qkv", "mlp.fc1", "mlp.fc2")
    qkv, fc1 = found["blocks.0.attn.qkv"], found["blocks.1.mlp.fc1"]
    assert [(part.name, part.start, part.stop) for part in qkv.parts] == [("q", 0, 64), ("k", 64, 128), ("v", 128, 192)]
    assert {part.architecture for part in qkv.parts} == {monarch(64, 64, 4)}
    assert [(part.name, part.architecture) for part in fc1.parts] == [(None, monarch(256, 64, 4))]
    assert (qkv.role, fc1.role, found["blocks.0.mlp.fc2"].role) == ("qkv", "ffn_in", "ffn_out")
    reasons = [found[fqn].reason for fqn in ("blocks.0.attn.proj", "head")]
    assert [reason and reason.code for reason in reasons] == ["not-selected", "head"]
    assert made.base == "vit_tiny_patch16_224.augreg_in21k_ft_in1k"
    assert (made.base_args["num_classes"], made.base_args["img_size"], made.base_args["depth"]) == (7, [32, 32], 2)
    with torch.device("meta"):
        empty = timm.create_model("vit_tiny_patch16_224", num_classes=7, **TINY)
    assert plan(empty) == made
    tokens = 2 * 2 + 1
    fc1 = layers(plan(vit, example=torch.zeros(6, 3, 32, 32)))["blocks.0.mlp.fc1"]
    assert (fc1.calls, fc1.rows, fc1.flops_before) == (1, tokens, 2 * 256 * 64 * tokens)


def test_families_options_and_selection(vit: nn.Module) -> None:
    assert layers(plan(vit, nblocks=8))["blocks.0.mlp.fc1"].parts[0].architecture == monarch(256, 64, 8)
    assert layers(plan(vit, "lowrank", rank=5))["blocks.0.mlp.fc2"].parts[0].architecture == low_rank(64, 256, 5)
    assert names(plan(vit, roles=("attn_out",))) == blocks("attn.proj")
    assert names(plan(vit, include=r"blocks\.1", exclude="qkv")) == {"blocks.1.mlp.fc1", "blocks.1.mlp.fc2"}
    with pytest.raises(SelectionError):
        plan(vit, include="no_such_layer")


def test_default_roles_are_those_that_the_model_has_and_named_ones_must_occur() -> None:
    mixer = MlpMixer(img_size=32, patch_size=8, num_blocks=1, embed_dim=64, num_classes=3)
    images = torch.zeros(2, 3, 32, 32)
    made = plan(mixer, example=images)
    assert [layer.role for layer in made.replaced if "channels" in layer.fqn] == ["ffn_in", "ffn_out"]
    assert plan(mixer, roles="ffn", example=images) == made
    with pytest.raises(SelectionError, match="'qkv'"):
        plan(mixer, roles=("ffn", "qkv"), example=images)
    with pytest.raises(SelectionError, match=r"the roles found are head \(1\)"):
        plan(nn.Sequential(nn.Linear(32, 32), nn.Flatten()), example=torch.zeros(2, 32))


def test_explicit_patterns_go_where_they_fit(vit: nn.Module) -> None:
    made = plan(vit, patterns=["(1,32,8,2),(2,8,32,1)", "(1,128,32,2),(2,32,32,1)"])
    assert names(made) == blocks("attn.qkv", "mlp.fc1")
    assert layers(made)["blocks.0.attn.qkv"].parts[1].architecture == Architecture.of((1, 32, 8, 2), (2, 8, 32, 1))
    down = layers(made)["blocks.0.mlp.fc2"].reason
    assert down is not None and down.code == "no-pattern" and "64x256" in down.text
    whole = "(1,96,16,2),(2,16,32,1)"  # of the fused matrix, which then is not taken apart
    assert [(part.name, str(part.architecture)) for part in layers(plan(vit, patterns=whole))["blocks.0.attn.qkv"].parts] == [(None, whole)]
    with pytest.raises(PatternError, match=r"blocks.0.mlp.fc2: the matrix is 64x256.*is 256x64"):
        plan(vit, patterns=monarch(256, 64), include="mlp")
    sizes = "describe a 100x64 matrix, and the selected layers and their parts are 64x64, 64x256, 192x64, 256x64"
    with pytest.raises(SelectionError, match=sizes):
        plan(vit, patterns=[monarch(256, 64), monarch(100, 64)])


def test_what_cannot_be_planned_says_why(vit: nn.Module) -> None:
    with pytest.raises(PlanError, match=r"nothing would be replaced: no-pattern \(\d layers\): .*"):
        plan(vit, nblocks=48)
    with pytest.raises(PlanError, match="no-gain"):
        plan(vit, nblocks=1, roles=("attn_out",))
    apply(plan(vit), vit)
    with pytest.raises(SurgeryError, match=r"converted already \(6 layers, such as blocks.0.attn.qkv\); densify it first"):
        plan(vit)


class Uneven(nn.Module):
    """Eight query heads of width 4 that share one key and value head of width 6."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(32, 32 + 4 + 6)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).split((32, 4, 6), dim=-1)
        q = q.unflatten(-1, (8, 4)).transpose(1, 2)
        scores = q @ k.unsqueeze(1).transpose(-2, -1) / 2
        return (scores.softmax(-1) @ v.unsqueeze(1)).flatten(1)


def test_a_part_without_an_architecture_stays_dense() -> None:
    model = Uneven()
    made = plan(model, nblocks=8, example=torch.randn(2, 5, 32))
    assert [(part.name, part.architecture) for part in made.layers[0].parts] == [("q", monarch(32, 32, 8)), ("k", None), ("v", None)]
    key = model.qkv.weight.detach()[32:36].clone()
    apply(made, model)
    assert torch.equal(model.qkv.k.weight, key)
    assert densify(model) == 1 and torch.equal(model.qkv.weight[32:36], key)


def test_parents_that_read_the_weight_are_switched() -> None:
    model = beit()
    made = plan(model)
    assert {(each.module_fqn, each.attribute, each.value) for each in made.switches} == {
        (f"blocks.{i}.attn", "qkv_bias_separate", True) for i in (0, 1)
    }
    assert plan(model, roles=("ffn",)).switches == ()
    assert not layers(made)["blocks.0.attn.qkv"].bias


def test_vit_pytorch() -> None:
    model = vit_pytorch.ViT(image_size=32, patch_size=16, num_classes=5, dim=64, depth=1, heads=2, dim_head=32, mlp_dim=128)
    made = plan(model, base="vit_pytorch:ViT", base_args={"depth": 1})
    assert (len(made.replaced), made.base, dict(made.base_args)) == (3, "vit_pytorch:ViT", {"depth": 1})
    assert {layer.role for layer in made.replaced} == {"qkv", "ffn_in", "ffn_out"}


def test_matrices_get_what_fits_them_or_a_reason() -> None:
    square, up = monarch(64, 64, 8), monarch(256, 64, 8)
    given = Rule(architectures=(square, up))
    assert (Rule("gonon").choose(384, 1536), given.choose(64, 64), given.choose(256, 64)) == (gonon(384, 1536), square, up)
    for rule, size, code, words in (
        (Rule("monarch"), (10, 64), "no-pattern", ("10", "64")),
        (Rule("monarch", nblocks=1), (64, 64), "no-gain", ("8192", "4096")),
        (given, (64, 256), "no-pattern", ("64x256", "is 256x64")),
    ):
        reason = rule.choose(*size)
        assert isinstance(reason, Reason) and reason.code == code and all(word in reason.text for word in words)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"arch": "butterfly"}, "monarch, gonon, lowrank"),
        ({"nblocks": 0}, "nblocks must be a positive integer, got 0"),
        ({"nblocks": 2.0}, "nblocks must be a positive integer"),
        ({"arch": "lowrank", "rank": -3}, "rank must be a positive integer, got -3"),
        ({"rank": 8}, "takes no rank"),
        ({"arch": "gonon", "nblocks": 8}, "takes no nblocks"),
        ({"architectures": (monarch(8, 8, 2),), "nblocks": 8}, "patterns name the architecture, so nblocks"),
    ],
)
def test_options_out_of_range_or_in_contradiction(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        Rule(**options)


def test_every_form_of_patterns_is_read() -> None:
    square, up = monarch(8, 8, 2), monarch(16, 8, 2)
    assert read_architectures(None) == ()
    for form in (square, str(square), [str(square)], square.to_json()):
        assert read_architectures(form) == (square,)
    assert read_architectures([str(square), up]) == (square, up)
    for wrong in ("(1,2,3)", [], [[1, 2, 3]], [1, 2]):
        with pytest.raises(PatternError):
            read_architectures(wrong)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("vit_tiny_patch16_224", {**TINY, "num_classes": 7, "in_chans": 1}),
        ("vit_tiny_patch16_224", {**TINY, "global_pool": "avg", "num_classes": 0}),
        ("eva02_tiny_patch14_224", {**TINY, "img_size": 56}),
        ("swin_tiny_patch4_window7_224", {"img_size": 112, "in_chans": 4}),
        ("levit_128s", {"num_classes": 5}),
        ("vit_base_patch16_siglip_224.v2_webli", {"depth": 1}),
    ],
)
def test_a_timm_model_says_how_it_is_built_again(name: str, arguments: dict[str, Any]) -> None:
    with torch.device("meta"):
        model = timm.create_model(name, **arguments)
        base, base_args = find_base(model, None, None)
        assert base is not None and base.startswith(name)
        again = timm.create_model(base, **json.loads(json.dumps(base_args)))
    assert {key: value.shape for key, value in again.state_dict().items()} == {
        key: value.shape for key, value in model.state_dict().items()
    }


def test_what_is_given_goes_before_what_the_model_says(monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.device("meta"):
        model = timm.create_model("vit_tiny_patch16_224", in_chans=1, num_classes=7, **TINY)
        other = timm.create_model("vit_tiny_patch16_224", act_layer=nn.ReLU, **TINY)
    base, base_args = find_base(model, None, {"num_classes": 9})
    assert (base, base_args["num_classes"], base_args["depth"]) == ("vit_tiny_patch16_224.augreg_in21k_ft_in1k", 9, 2)
    assert find_base(model, "vit_pytorch:ViT", {"depth": 1}) == ("vit_pytorch:ViT", {"depth": 1})
    model.reset_classifier(3)
    assert find_base(model, None, None)[1]["num_classes"] == 3
    for unknown in (other, nn.Linear(2, 2)):  # JSON has no functions
        assert find_base(unknown, None, None) == (None, {})
    with pytest.raises(OptionError, match="base_args must be values that JSON has"):
        find_base(model, "vit_tiny_patch16_224", {"act_layer": nn.ReLU})
    monkeypatch.delattr(timm.models, "get_model_args", raising=False)  # as in earlier versions of timm
    assert find_base(model, None, None)[1] == {"img_size": [32, 32], "in_chans": 1, "num_classes": 3}
