"""From a model to a plan, through the walker."""

from __future__ import annotations

import copy

import pytest
import timm
import torch
import vit_pytorch
from timm.models.mlp_mixer import MlpMixer
from torch import Tensor, nn

from flysurgery.errors import PatternError, PlanError, SelectionError, SurgeryError
from flysurgery.patterns import Architecture, low_rank, monarch
from flysurgery.surgery import LayerPlan, Plan, apply, plan

TINY = {"img_size": 32, "depth": 2, "embed_dim": 64, "num_heads": 2}


def layers(of: Plan) -> dict[str, LayerPlan]:
    return {layer.fqn: layer for layer in of.layers}


def test_default_plan_of_a_timm_vit(vit: nn.Module) -> None:
    made = plan(vit)
    found = layers(made)
    assert {layer.fqn for layer in made.replaced} == {f"blocks.{i}.{name}" for i in (0, 1) for name in ("attn.qkv", "mlp.fc1", "mlp.fc2")}
    qkv, fc1 = found["blocks.0.attn.qkv"], found["blocks.1.mlp.fc1"]
    assert [(part.name, part.start, part.stop) for part in qkv.parts] == [("q", 0, 64), ("k", 64, 128), ("v", 128, 192)]
    assert {part.architecture for part in qkv.parts} == {monarch(64, 64, 4)}
    assert [(part.name, part.architecture) for part in fc1.parts] == [(None, monarch(256, 64, 4))]
    assert (qkv.role, fc1.role, found["blocks.0.mlp.fc2"].role) == ("qkv", "ffn_in", "ffn_out")
    proj, head = found["blocks.0.attn.proj"].reason, found["head"].reason
    assert proj is not None
    assert head is not None
    assert (proj.code, head.code) == ("not-selected", "head")
    assert made.base == "vit_tiny_patch16_224.augreg_in21k_ft_in1k"
    assert (made.base_args["num_classes"], made.base_args["img_size"], made.base_args["depth"]) == (7, [32, 32], 2)


def test_rows_and_flops_are_those_of_one_sample(vit: nn.Module) -> None:
    tokens = 2 * 2 + 1
    for images in (torch.zeros(1, 3, 32, 32), torch.zeros(6, 3, 32, 32)):
        fc1 = layers(plan(vit, example=images))["blocks.0.mlp.fc1"]
        assert (fc1.calls, fc1.rows, fc1.flops_before) == (1, tokens, 2 * 256 * 64 * tokens)


def test_planning_changes_nothing(vit: nn.Module) -> None:
    state, modules, modes = copy.deepcopy(vit.state_dict()), dict(vit.named_modules()), [module.training for module in vit.modules()]
    random = torch.get_rng_state()
    plan(vit)
    assert torch.equal(torch.get_rng_state(), random)
    assert dict(vit.named_modules()) == modules
    assert [module.training for module in vit.modules()] == modes
    assert all(torch.equal(value, vit.state_dict()[name]) for name, value in state.items())


def test_a_model_on_meta_gives_the_same_plan(vit: nn.Module) -> None:
    with torch.device("meta"):
        empty = timm.create_model("vit_tiny_patch16_224", num_classes=7, **TINY)
    assert plan(empty) == plan(vit)


def test_families_and_their_options(vit: nn.Module) -> None:
    assert layers(plan(vit, nblocks=8))["blocks.0.mlp.fc1"].parts[0].architecture == monarch(256, 64, 8)
    assert layers(plan(vit, "lowrank", rank=5))["blocks.0.mlp.fc2"].parts[0].architecture == low_rank(64, 256, 5)


def test_selection_by_role_and_name(vit: nn.Module) -> None:
    assert {layer.fqn for layer in plan(vit, roles=("attn_out",)).replaced} == {"blocks.0.attn.proj", "blocks.1.attn.proj"}
    assert {layer.fqn for layer in plan(vit, include=r"blocks\.1", exclude="qkv").replaced} == {"blocks.1.mlp.fc1", "blocks.1.mlp.fc2"}
    with pytest.raises(SelectionError):
        plan(vit, include="no_such_layer")


def test_default_roles_are_those_that_the_model_has_and_named_ones_must_occur() -> None:
    mixer = MlpMixer(img_size=32, patch_size=8, num_blocks=1, embed_dim=64, num_classes=3)
    images = torch.zeros(2, 3, 32, 32)
    made = plan(mixer, example=images)
    assert {layer.fqn: layer.role for layer in made.replaced if "channels" in layer.fqn} == {
        "blocks.0.mlp_channels.fc1": "ffn_in",
        "blocks.0.mlp_channels.fc2": "ffn_out",
    }
    assert plan(mixer, roles="ffn", example=images) == made
    with pytest.raises(SelectionError, match="'qkv'"):
        plan(mixer, roles=("ffn", "qkv"), example=images)
    with pytest.raises(SelectionError, match=r"the roles found are head \(1\)"):
        plan(nn.Sequential(nn.Linear(32, 32), nn.Flatten()), example=torch.zeros(2, 32))


def test_explicit_patterns_go_where_they_fit(vit: nn.Module) -> None:
    made = plan(vit, patterns=["(1,32,8,2),(2,8,32,1)", "(1,128,32,2),(2,32,32,1)"])
    assert {layer.fqn for layer in made.replaced} == {f"blocks.{i}.{name}" for i in (0, 1) for name in ("attn.qkv", "mlp.fc1")}
    assert layers(made)["blocks.0.attn.qkv"].parts[1].architecture == Architecture.of((1, 32, 8, 2), (2, 8, 32, 1))
    down = layers(made)["blocks.0.mlp.fc2"].reason
    assert down is not None
    assert (down.code, "64x256" in down.text) == ("no-pattern", True)


def test_a_pattern_of_the_whole_fused_matrix_leaves_it_whole(vit: nn.Module) -> None:
    whole = "(1,96,16,2),(2,16,32,1)"
    qkv = layers(plan(vit, patterns=whole))["blocks.0.attn.qkv"]
    assert [(part.name, str(part.architecture)) for part in qkv.parts] == [(None, whole)]


def test_patterns_that_do_not_fit(vit: nn.Module) -> None:
    with pytest.raises(PatternError, match=r"blocks.0.mlp.fc2: the matrix is 64x256.*is 256x64"):
        plan(vit, patterns=monarch(256, 64), include="mlp")
    with pytest.raises(
        SelectionError, match="describe a 100x64 matrix, and the selected layers and their parts are 64x64, 64x256, 192x64, 256x64"
    ):
        plan(vit, patterns=[monarch(256, 64), monarch(100, 64)])


def test_a_plan_that_replaces_nothing_says_why(vit: nn.Module) -> None:
    with pytest.raises(PlanError, match=r"nothing would be replaced: no-pattern \(\d layers\): .*"):
        plan(vit, nblocks=48)
    with pytest.raises(PlanError, match="no-gain"):
        plan(vit, nblocks=1, roles=("attn_out",))


def test_a_part_without_an_architecture_stays_dense() -> None:
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

    model = Uneven()
    x = torch.randn(2, 5, 32)
    made = plan(model, nblocks=8, example=x)
    assert [(part.name, part.architecture) for part in made.layers[0].parts] == [("q", monarch(32, 32, 8)), ("k", None), ("v", None)]
    key = model.qkv.weight.detach()[32:36].clone()
    apply(made, model)
    assert torch.equal(model.qkv.k.weight, key)


def test_parents_that_read_the_weight_are_switched() -> None:
    model = timm.create_model("beit_base_patch16_224", **TINY).eval()
    x = torch.randn(2, 3, 32, 32)
    made = plan(model)
    assert {(switch.module_fqn, switch.attribute, switch.value) for switch in made.switches} == {
        ("blocks.0.attn", "qkv_bias_separate", True),
        ("blocks.1.attn", "qkv_bias_separate", True),
    }
    assert not layers(made)["blocks.0.attn.qkv"].bias
    before = model(x)
    apply(made, model)
    assert model.blocks[0].attn.qkv_bias_separate
    assert all(parameter is None for name, parameter in model.blocks[0].attn.qkv.named_parameters() if "bias" in name)
    assert not torch.equal(model(x), before)


def test_switches_of_layers_that_stay_are_left_out() -> None:
    model = timm.create_model("beit_base_patch16_224", **TINY)
    assert plan(model, roles=("ffn",)).switches == ()


def test_vit_pytorch() -> None:
    model = vit_pytorch.ViT(image_size=32, patch_size=16, num_classes=5, dim=64, depth=2, heads=2, dim_head=32, mlp_dim=128)
    made = plan(model, base="vit_pytorch:ViT", base_args={"depth": 2})
    assert (len(made.replaced), made.base, dict(made.base_args)) == (6, "vit_pytorch:ViT", {"depth": 2})
    assert {layer.role for layer in made.replaced} == {"qkv", "ffn_in", "ffn_out"}
    report = apply(made, model)
    assert report.verified


def test_a_converted_model_is_refused(vit: nn.Module) -> None:
    apply(plan(vit), vit)
    with pytest.raises(SurgeryError, match=r"converted already \(6 layers, such as blocks.0.attn.qkv\); densify it first"):
        plan(vit)
