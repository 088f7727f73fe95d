"""From a converted model back to a dense one."""

from __future__ import annotations

import copy

import pytest
import timm
import torch
from torch import Tensor, nn

from flysurgery.errors import PlanError, SurgeryError
from flysurgery.layers import ButterflyLinear, SplitLinear
from flysurgery.patterns import monarch
from flysurgery.surgery import Plan, apply, densify, plan, plan_of
from tests.support.oracle import dense


def product(factors: nn.ParameterList) -> Tensor:
    left, right = (dense(factor.detach().double()) for factor in factors)
    return left @ right


def test_weights_are_the_products_rounded_once(vit: nn.Module, vit_plan: Plan) -> None:
    apply(vit_plan, vit)
    converted = copy.deepcopy(vit)
    assert densify(vit) == 6
    for layer in vit_plan.replaced:
        module, linear = converted.get_submodule(layer.fqn), vit.get_submodule(layer.fqn)
        parts = list(module.children()) if isinstance(module, SplitLinear) else [module]
        assert type(linear) is nn.Linear
        exact = torch.cat([product(part.factors) for part in parts])
        rounding = torch.finfo(torch.float32).eps / 2  # one rounding to float32; float64 sums are far below that
        assert ((linear.weight.double() - exact).abs() <= 1.001 * rounding * exact.abs() + 1e-15).all()
        assert torch.equal(linear.bias, torch.cat([part.bias for part in parts]))


def test_names_shapes_dtype_and_mode_are_those_before(vit: nn.Module, vit_plan: Plan) -> None:
    vit.to(torch.bfloat16)
    vit.blocks[0].eval()
    vit.blocks[0].mlp.fc1.weight.requires_grad_(False)
    vit.blocks[1].attn.qkv.bias.requires_grad_(False)
    before = copy.deepcopy(vit)
    apply(vit_plan, vit)
    densify(vit)
    assert {name: (each.shape, each.dtype) for name, each in vit.state_dict().items()} == {
        name: (each.shape, each.dtype) for name, each in before.state_dict().items()
    }
    assert {name: each.requires_grad for name, each in vit.named_parameters()} == {
        name: each.requires_grad for name, each in before.named_parameters()
    }
    assert [(name, each.training) for name, each in vit.named_modules()] == [(name, each.training) for name, each in before.named_modules()]


def test_a_densified_model_carries_no_plan_and_converts_again_to_the_same(vit: nn.Module, vit_plan: Plan) -> None:
    apply(vit_plan, vit)
    densify(vit)
    assert plan_of(vit) is None
    assert all(row.relative_error < 1e-6 for row in apply(vit_plan, vit).replaced if row.relative_error is not None)


def test_switches_are_set_back() -> None:
    model = timm.create_model("beit_base_patch16_224", img_size=32, depth=2, embed_dim=64, num_heads=2)
    model.blocks[1].attn.qkv_bias_separate = True
    apply(plan(model), model)
    assert [block.attn.qkv_bias_separate for block in model.blocks] == [True, True]
    densify(copy.deepcopy(model))
    densify(model)
    assert [block.attn.qkv_bias_separate for block in model.blocks] == [False, True]


def test_a_part_that_stayed_dense_keeps_its_rows(toy: nn.Module) -> None:
    q, k = ButterflyLinear(monarch(32, 32, 2)), nn.Linear(32, 5, bias=False)
    toy.blocks[0].qkv = SplitLinear({"q": q, "k": k})
    assert densify(toy) == 1
    qkv = toy.get_submodule("blocks.0.qkv")
    assert torch.equal(qkv.weight[32:], k.weight)
    assert torch.equal(qkv.bias, torch.cat([q.bias, torch.zeros(5)]))


def test_a_shared_layer_counts_once_and_stays_shared(toy: nn.Module) -> None:
    toy.blocks[0].up = toy.blocks[1].up = ButterflyLinear(monarch(64, 32, 2))
    assert densify(toy) == 1
    assert type(toy.get_submodule("blocks.0.up")) is nn.Linear
    assert toy.get_submodule("blocks.0.up") is toy.get_submodule("blocks.1.up")


def test_what_cannot_be_densified(vit: nn.Module) -> None:
    with pytest.raises(SurgeryError, match="no converted layer"):
        densify(vit)
    with pytest.raises(SurgeryError, match="itself a ButterflyLinear"):
        densify(ButterflyLinear(monarch(8, 8, 2)))


def test_a_root_that_is_a_linear_layer_is_no_plans_layer() -> None:
    model = nn.Linear(32, 32)
    with pytest.raises(PlanError):
        apply(plan(model, roles="head", example=torch.zeros(2, 3, 32)), model)
