"""Empty modules of a plan's shapes, into which a checkpoint's weights are loaded."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import timm
import torch
from torch import Tensor, nn

from flysurgery.errors import PlanError, SurgeryError
from flysurgery.patterns import Architecture
from flysurgery.surgery import LayerPlan, Part, Plan, apply, install, plan, plan_of


def meta_vit() -> nn.Module:
    with torch.device("meta"):
        return timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2, embed_dim=64, num_heads=2, num_classes=7)


def test_the_state_of_a_converted_model_loads_and_gives_its_outputs(vit: nn.Module, vit_plan: Plan, images: Tensor) -> None:
    apply(vit_plan, vit)
    again = meta_vit()
    install(Plan.from_json(vit_plan.to_json()), again)
    assert {tensor.device.type for tensor in again.state_dict().values()} == {"meta"}
    again.load_state_dict(vit.state_dict(), assign=True)
    assert torch.equal(again.eval()(images), vit.eval()(images))
    assert plan_of(again) == vit_plan


def test_on_a_real_device_dtype_and_mode_are_the_models_and_no_random_numbers_are_drawn(vit: nn.Module, vit_plan: Plan) -> None:
    vit.to(torch.bfloat16).eval()
    bias = vit.get_submodule("blocks.0.mlp.fc1").bias
    random = torch.get_rng_state()
    install(vit_plan, vit)
    fc1 = vit.get_submodule("blocks.0.mlp.fc1")
    assert torch.equal(torch.get_rng_state(), random)
    assert {(parameter.dtype, parameter.device.type) for parameter in fc1.parameters()} == {(torch.bfloat16, "cpu")}
    assert torch.equal(fc1.bias, bias)
    assert not fc1.training


def test_switches_are_set() -> None:
    with torch.device("meta"):
        model = timm.create_model("beit_base_patch16_224", img_size=32, depth=2, embed_dim=64, num_heads=2)
    made = plan(model)
    install(made, model)
    assert [block.attn.qkv_bias_separate for block in model.blocks] == [True, True]


def test_a_model_that_the_plan_contradicts_stays_dense(vit_plan: Plan) -> None:
    model = meta_vit()
    modules = dict(model.named_modules())
    unknown = LayerPlan("blocks.2.mlp.fc1", "ffn_in", 64, 256, True, 1, 5, "replace", parts=vit_plan.layers[2].parts)
    assert unknown.parts[0].architecture is not None
    with pytest.raises(PlanError, match=r"blocks.2.mlp.fc1', and the model has no module"):
        install(dataclasses.replace(vit_plan, layers=(*vit_plan.layers, unknown)), model)
    wide = Architecture.of((1, 64, 16, 8), (8, 16, 8, 1))
    other = LayerPlan("blocks.0.mlp.fc1", "ffn_in", 64, 512, True, 1, 5, "replace", parts=(Part(None, 0, 512, wide),))
    with pytest.raises(PlanError, match="the plan says 512x64, the model has 256x64"):
        install(Plan((other,)), model)
    assert dict(model.named_modules()) == modules
    assert plan_of(model) is None


def test_a_converted_model_is_refused(vit: nn.Module, vit_plan: Plan) -> None:
    install(vit_plan, vit)
    with pytest.raises(SurgeryError, match="densify it first"):
        install(vit_plan, vit)


def test_an_installed_model_can_be_copied(vit_plan: Plan) -> None:
    model = meta_vit()
    install(vit_plan, model)
    twin = copy.deepcopy(model)
    assert twin.state_dict().keys() == model.state_dict().keys()
    assert plan_of(twin) == vit_plan
