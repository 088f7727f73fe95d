"""What a conversion does to a model, what it leaves as it was, and the way back to dense layers."""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
import vit_pytorch
from torch import Tensor, nn

import flysurgery
from flysurgery.errors import OptionError, PlanError, SurgeryError
from flysurgery.factors import factors_to_dense
from flysurgery.inference import convert
from flysurgery.layers import ButterflyConv, ButterflyLinear, SplitLinear
from flysurgery.patterns import monarch
from flysurgery.projection import project
from flysurgery.surgery import Plan, apply, densify, install, plan, plan_of
from tests.support.oracle import dense as dense_factor
from tests.support.tolerance import FP32, MIN_OUTPUTS
from tests.surgery.conftest import TINY, beit, make_exact, unchanged


def parts_of(module: nn.Module) -> list[Any]:
    return list(module.children()) if isinstance(module, SplitLinear) else [module]


def test_factors_are_the_projections_and_the_rest_stays(vit: nn.Module, vit_plan: Plan) -> None:
    dense = copy.deepcopy(vit)
    seen: list[tuple[int, int, str]] = []
    apply(vit_plan, vit, progress=lambda *each: seen.append(each))
    assert seen == [(i, 6, layer.fqn) for i, layer in enumerate(vit_plan.replaced, start=1)]
    for layer in vit_plan.replaced:
        old, new = dense.get_submodule(layer.fqn), vit.get_submodule(layer.fqn)
        for part, module in zip(layer.parts, parts_of(new), strict=True):
            assert isinstance(module, ButterflyLinear) and part.architecture is not None
            expected = project(old.weight.detach()[part.start : part.stop], part.architecture).factors
            assert all(torch.equal(a, b) for a, b in zip(module.factors, expected, strict=True))
            assert torch.equal(module.bias, old.bias[part.start : part.stop])
    kept = {name for name in dense.state_dict() if not any(name.startswith(f"{layer.fqn}.") for layer in vit_plan.replaced)}
    assert kept and all(torch.equal(dense.state_dict()[name], vit.state_dict()[name]) for name in kept)
    assert [name for name in vit.state_dict() if name.startswith(("blocks.0.attn.qkv", "blocks.0.mlp.fc1"))] == [
        *(f"blocks.0.attn.qkv.{part}.{tensor}" for part in "qkv" for tensor in ("bias", "factors.0", "factors.1")),
        *(f"blocks.0.mlp.fc1.{tensor}" for tensor in ("bias", "factors.0", "factors.1")),
    ]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_dtype_mode_and_requires_grad_stay_there_and_back(vit: nn.Module, vit_plan: Plan, dtype: torch.dtype) -> None:
    vit.to(dtype)
    vit.blocks[0].eval()
    vit.blocks[0].mlp.fc1.weight.requires_grad_(False)
    vit.blocks[1].attn.qkv.bias.requires_grad_(False)
    before = copy.deepcopy(vit)
    apply(vit_plan, vit)
    fc1, qkv = vit.get_submodule("blocks.0.mlp.fc1"), vit.get_submodule("blocks.1.attn.qkv")
    assert {parameter.dtype for parameter in vit.parameters()} == {dtype}
    assert [module.training for module in (vit, fc1, qkv, *qkv.children())] == [True, False, True, True, True, True]
    trains = {name: parameter.requires_grad for name, parameter in fc1.named_parameters()}
    assert trains == {"bias": True, "factors.0": False, "factors.1": False}
    assert all(parameter.requires_grad != name.endswith("bias") for name, parameter in qkv.named_parameters())
    densify(vit)
    old, new = ([(name, each.shape, each.dtype, each.requires_grad) for name, each in model.named_parameters()] for model in (before, vit))
    assert old == new
    assert [(name, each.training) for name, each in vit.named_modules()] == [(name, each.training) for name, each in before.named_modules()]


def test_random_state_batch_statistics_and_modes_stay(vit: nn.Module) -> None:
    vit.norm = nn.BatchNorm1d(5)  # of the tokens
    vit.blocks[1].eval()
    buffers = {name: buffer.clone() for name, buffer in vit.named_buffers()}
    random, threads = torch.get_rng_state(), torch.get_num_threads()
    apply(plan(vit), vit)
    assert torch.equal(torch.get_rng_state(), random) and torch.get_num_threads() == threads
    assert buffers and all(torch.equal(buffer, buffers[name]) for name, buffer in vit.named_buffers())
    assert [module.training for module in (vit.norm, *vit.blocks)] == [True, True, False]


def test_the_report_counts_and_measures(vit: nn.Module, vit_plan: Plan) -> None:
    dense = copy.deepcopy(vit)
    report = apply(vit_plan, vit)
    rows = {row.fqn: row for row in report.rows}
    assert list(rows) == [layer.fqn for layer in vit_plan.layers]
    for layer in vit_plan.replaced:
        weight, module, row = dense.get_parameter(f"{layer.fqn}.weight").detach().double(), vit.get_submodule(layer.fqn), rows[layer.fqn]
        product = torch.cat([factors_to_dense([factor.detach().double() for factor in part.factors]) for part in parts_of(module)])
        error = float((weight - product).norm() / weight.norm())
        assert (row.relative_error, row.energy_kept) == (pytest.approx(error), pytest.approx(1 - error**2))
        assert row.params_after == sum(parameter.numel() for parameter in module.parameters())
        assert row.params_before == layer.params_before and row.seconds is not None
    assert [part.name for part in rows["blocks.0.attn.qkv"].parts] == ["q", "k", "v"]
    head = rows["head"]
    assert head.reason is not None
    assert (head.status, head.reason.code, head.relative_error, head.seconds) == ("keep", "head", None, None)
    assert head.params_before == head.params_after == 64 * 7 + 7
    totals, counts = report.totals, [sum(parameter.numel() for parameter in model.parameters()) for model in (dense, vit)]
    assert [totals["model_params_before"], totals["model_params_after"]] == counts
    assert totals["replaced_params_before"] - totals["replaced_params_after"] == counts[0] - counts[1]
    assert totals["linear_flops_before"] == sum(layer.flops_before for layer in vit_plan.layers)
    document = json.loads(json.dumps(report.to_json()))
    assert document["calibration"] is None and document["totals"]["replaced"] == 6
    assert document["rows"][0]["parts"][0]["name"] == "q" and document["rows"][-1]["reason"]["code"] == "head"
    text = str(report)
    assert "replaced 6 of 9 linear layers" in text and "one forward called each" in text and "keep dense" in text


def test_without_verification_no_forward_runs(vit: nn.Module, vit_plan: Plan) -> None:
    ran: list[int] = []
    vit.register_forward_hook(lambda *_: ran.append(1))
    assert not apply(vit_plan, vit, verify=False).verified
    assert not ran


def test_convert_is_plan_and_apply(vit: nn.Module) -> None:
    twin = copy.deepcopy(vit)
    convert(vit, "lowrank", rank=8, roles=("ffn",), verify=False)
    apply(plan(twin, "lowrank", rank=8, roles=("ffn",)), twin)
    assert all(torch.equal(value, twin.state_dict()[name]) for name, value in vit.state_dict().items())


def test_the_plan_stays_with_the_model_its_copies_and_pickles(vit: nn.Module, vit_plan: Plan) -> None:
    assert plan_of(vit) is None
    apply(vit_plan, vit)
    assert plan_of(vit) is vit_plan
    assert plan_of(copy.deepcopy(vit)) == plan_of(pickle.loads(pickle.dumps(vit))) == vit_plan


def test_a_shared_module_is_replaced_under_all_its_names_and_stays_shared(vit: nn.Module) -> None:
    first, second = "blocks.0.mlp.fc1", "blocks.1.mlp.fc1"
    vit.blocks[1].mlp.fc1 = vit.blocks[0].mlp.fc1
    made = plan(vit)
    assert [(layer.fqn, layer.aliases, layer.calls) for layer in made.replaced if layer.aliases] == [(first, (second,), 2)]
    apply(made, vit)
    assert isinstance(vit.get_submodule(second), ButterflyLinear) and vit.get_submodule(second) is vit.get_submodule(first)
    assert densify(vit) == 5
    assert type(vit.get_submodule(second)) is nn.Linear and vit.get_submodule(second) is vit.get_submodule(first)


class Mobile(nn.Module):
    """A feed-forward block of convolutions, whose result goes through a view."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Conv2d(16, 64, 1), nn.Conv2d(64, 16, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.down(self.up(x).relu())).view(x.shape[0], 16, -1)


class Listed(nn.Module):
    """Calls its children from a list of its own, of which modules know nothing, and looks at the dtype of a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = [nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)]
        for index, step in enumerate(self.steps):
            self.add_module(str(index), step)

    def forward(self, x: Tensor) -> Tensor:
        y = x.to(self.steps[0].weight.dtype)
        for step in self.steps:
            y = step(y)
        return x + y


X = torch.zeros(2, 16, 8, 8)
MODELS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "timm": (lambda: timm.create_model("vit_tiny_patch16_224", num_classes=300, **TINY), {}),
    "switched": (lambda: timm.create_model("beit_base_patch16_224", num_classes=300, **TINY), {}),
    "gated": (lambda: timm.create_model("eva02_tiny_patch14_224", num_classes=300, **TINY | {"img_size": 28, "embed_dim": 96}), {}),
    "vit-pytorch": (
        lambda: vit_pytorch.ViT(image_size=32, patch_size=16, num_classes=300, dim=64, depth=2, heads=2, dim_head=32, mlp_dim=128),
        {},
    ),
    "listed": (Listed, {"roles": ("ffn",), "example": torch.zeros(2, 16, 64)}),
    "convolutions": (Mobile, {"roles": None, "example": X, "convs": True}),
}


def rms(values: Tensor) -> float:
    return values.square().mean().sqrt().item()


@pytest.mark.parametrize("name", MODELS)
def test_products_that_are_exact_keep_the_outputs(name: str) -> None:
    torch.manual_seed(5)
    make, options = MODELS[name]
    model = make().eval()
    made = Plan.from_json(plan(model, **{"roles": ("ffn", "qkv", "attn_out")} | options).to_json())
    make_exact(made, model)
    assert made.example is not None
    x = torch.randn(16, *made.example[0].shape[1:])  # pyright: ignore[reportAttributeAccessIssue]
    kinds = [type(module) for module in model.modules()]
    with torch.no_grad():
        truth = copy.deepcopy(model).double()(x.double())
        dense = model(x)
        assert len(apply(made, model).replaced) == len(made.replaced) >= 2
        converted = model(x)
        assert densify(model) == len(made.replaced)
        densified = model(x)
    assert [type(module) for module in model.modules()] == kinds
    assert truth.numel() >= MIN_OUTPUTS
    allowed = FP32.k * rms(dense - truth)
    assert allowed < 1e-4 * rms(truth)
    assert rms(converted - truth) <= allowed and rms(densified - truth) <= allowed


def test_convolutions_are_replaced_where_that_is_asked_for() -> None:
    reason = "conv1x1 \\(2 layers\\): it is a 1x1 convolution, replaced only where convs are asked for"
    with pytest.raises(PlanError, match=reason):
        plan(Mobile(), example=X)
    made, model = plan(Mobile(), example=X, convs=True), Mobile()
    model.up = nn.Conv2d(16, 64, 1, stride=2)
    with unchanged(model), pytest.raises(PlanError, match="layer up: expected a 1x1 convolution without stride"):
        apply(made, model)
    with torch.device("meta"):
        empty = Mobile()
    install(made, empty)
    assert sorted(empty.state_dict()) == ["down.factors.0", "down.factors.1", "up.bias", "up.factors.0", "up.factors.1"]
    assert isinstance(empty.up, ButterflyConv)


def test_densified_weights_are_the_products_rounded_once_and_convert_to_the_same(vit: nn.Module, vit_plan: Plan) -> None:
    apply(vit_plan, vit)
    converted = copy.deepcopy(vit)
    assert densify(vit) == 6 and plan_of(vit) is None
    for layer in vit_plan.replaced:
        parts, linear = parts_of(converted.get_submodule(layer.fqn)), vit.get_submodule(layer.fqn)
        assert type(linear) is nn.Linear
        factors = [[dense_factor(factor.detach().double()) for factor in part.factors] for part in parts]
        exact = torch.cat([left @ right for left, right in factors])
        rounding = torch.finfo(torch.float32).eps / 2  # one rounding to float32; float64 sums are far below that
        assert ((linear.weight.double() - exact).abs() <= 1.001 * rounding * exact.abs() + 1e-15).all()
        assert torch.equal(linear.bias, torch.cat([part.bias for part in parts]))
    assert all(row.relative_error < 1e-6 for row in apply(vit_plan, vit).replaced if row.relative_error is not None)


def test_switches_are_set_back() -> None:
    model = beit()
    model.blocks[1].attn.qkv_bias_separate = True
    made = plan(model)
    for convert_by in (apply, install):
        convert_by(made, model)
        assert [block.attn.qkv_bias_separate for block in model.blocks] == [True, True]
        densify(copy.deepcopy(model))
        densify(model)
        assert [block.attn.qkv_bias_separate for block in model.blocks] == [False, True]


def test_what_cannot_be_densified(vit: nn.Module) -> None:
    with pytest.raises(SurgeryError, match="no converted layer"):
        densify(vit)
    with pytest.raises(SurgeryError, match="itself a ButterflyLinear"):
        densify(ButterflyLinear(monarch(8, 8, 2)))


def meta_vit() -> nn.Module:
    with torch.device("meta"):
        return timm.create_model("vit_tiny_patch16_224", num_classes=7, **TINY)


def test_an_installed_model_loads_the_state_and_gives_its_outputs(vit: nn.Module, vit_plan: Plan) -> None:
    images = torch.randn(4, 3, 32, 32)
    apply(vit_plan, vit)
    again = meta_vit()
    install(Plan.from_json(vit_plan.to_json()), again)
    assert {tensor.device.type for tensor in again.state_dict().values()} == {"meta"}
    assert copy.deepcopy(again).state_dict().keys() == vit.state_dict().keys()
    again.load_state_dict(vit.state_dict(), assign=True)
    assert torch.equal(again.eval()(images), vit.eval()(images))
    assert plan_of(again) == vit_plan
    with pytest.raises(SurgeryError, match="densify it first"):
        install(vit_plan, again)


def test_install_checks_before_it_changes(vit_plan: Plan) -> None:
    model = meta_vit()
    unknown = dataclasses.replace(vit_plan.replaced[0], fqn="blocks.2.attn.qkv")
    modules = dict(model.named_modules())
    with pytest.raises(PlanError, match=r"blocks.2.attn.qkv', and the model has no module"):
        install(dataclasses.replace(vit_plan, layers=(*vit_plan.layers, unknown)), model)
    assert dict(model.named_modules()) == modules and plan_of(model) is None


@pytest.mark.parametrize(
    ("call", "sentence"),
    [  # each is what a type checker would find
        (lambda _, __: flysurgery.plan("vit_tiny"), r"got str; build it first, as with timm.create_model\('vit_tiny'\)"),
        (lambda _, __: flysurgery.convert(3), "expected a torch.nn.Module, got int"),
        (lambda made, model: flysurgery.apply(model, made), "expected a plan and then a model, got VisionTransformer and Plan"),
        (lambda _, __: flysurgery.densify("folder"), "expected a torch.nn.Module, got str"),
        (lambda _, model: flysurgery.save("folder", model), "expected a model and then a folder, got str and VisionTransformer"),
    ],
)
def test_arguments_of_another_kind(call: Callable[..., Any], sentence: str, vit: nn.Module, vit_plan: Plan) -> None:
    with pytest.raises(flysurgery.FlysurgeryError, match=sentence):
        call(vit_plan, vit)


def test_auto_needs_a_goal_and_every_public_name_is_there(vit: nn.Module) -> None:
    with pytest.raises(OptionError, match="arch 'auto' needs what it is to choose by"):
        flysurgery.convert(vit, "auto")
    with pytest.raises(PlanError, match=r"nothing is faster than dense here; .* would count as faster"):
        flysurgery.convert(vit, "auto", measure=True)  # layers so small are faster dense on any machine
    report = flysurgery.convert(vit, "auto", budget=0.5)
    assert isinstance(report, flysurgery.Report) and report.tradeoff is not None and report.tradeoff.chosen.share <= 0.5
    assert all(hasattr(flysurgery, name) for name in flysurgery.__all__)
