"""What a conversion does to a model, the way back to dense layers, the report, and that a failed one leaves the model as it was."""

import copy
import json
import math
import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import flysurgery
from flysurgery.errors import FlysurgeryError, PlanError, ProjectionError, SurgeryError
from flysurgery.factors import factors_to_dense
from flysurgery.fidelity import Fidelity, Reconstruction
from flysurgery.inference import clock
from flysurgery.layers import ButterflyConv, ButterflyLinear, SplitLinear
from flysurgery.patterns import monarch
from flysurgery.projection import project
from flysurgery.surgery import ExampleInput, Plan, Report, apply, densify, install, plan, plan_of
from flysurgery.surgery.transaction import dense_layer
from flysurgery.walker import Switch
from tests.support.composed import Composed
from tests.support.models import unchanged
from tests.support.oracle import dense as dense_factor
from tests.surgery.conftest import Planned, beit
from tests.surgery.test_exact import mobile


def parts_of(module: nn.Module) -> list[Any]:
    return list(module.children()) if isinstance(module, SplitLinear) else [module]


def test_factors_are_the_projections_the_rest_stays_and_the_report_counts(vit: nn.Module, vit_plan: Plan) -> None:
    dense = copy.deepcopy(vit)
    seen: list[tuple[int, int, str]] = []
    report = apply(vit_plan, vit, progress=lambda *each: seen.append(each))
    assert seen == [(i, 6, layer.fqn) for i, layer in enumerate(vit_plan.replaced, start=1)]
    rows = {row.fqn: row for row in report.rows}
    assert list(rows) == [layer.fqn for layer in vit_plan.layers]
    for layer in vit_plan.replaced:
        old, new, row = dense.get_submodule(layer.fqn), vit.get_submodule(layer.fqn), rows[layer.fqn]
        products = []
        for part, module in zip(layer.parts, parts_of(new), strict=True):
            expected = project(old.weight.detach()[part.start : part.stop], part.architecture).factors
            assert all(torch.equal(a, b) for a, b in zip(module.factors, expected, strict=True))
            assert torch.equal(module.bias, old.bias[part.start : part.stop])
            products.append(factors_to_dense([factor.double() for factor in expected]))
        weight = old.weight.detach().double()
        assert row.relative_error == pytest.approx(float((weight - torch.cat(products)).norm() / weight.norm()))
        assert row.params_after == sum(parameter.numel() for parameter in new.parameters())
        assert row.params_before == layer.params_before and row.seconds is not None
    kept = {name for name in dense.state_dict() if not any(name.startswith(f"{layer.fqn}.") for layer in vit_plan.replaced)}
    assert kept and all(torch.equal(dense.state_dict()[name], vit.state_dict()[name]) for name in kept)
    names = [*(f"attn.qkv.{part}" for part in "qkv"), "mlp.fc1"]
    names = [f"blocks.0.{name}.{tensor}" for name in names for tensor in ("bias", "factors.0", "factors.1")]
    assert [name for name in vit.state_dict() if name.startswith(("blocks.0.attn.qkv", "blocks.0.mlp.fc1"))] == names
    totals = report.totals
    counts = [sum(parameter.numel() for parameter in model.parameters()) for model in (dense, vit)]
    assert [totals["model_params_before"], totals["model_params_after"]] == counts
    assert totals["replaced_params_before"] - totals["replaced_params_after"] == counts[0] - counts[1]
    assert totals["linear_flops_before"] == sum(layer.flops_before for layer in vit_plan.layers)
    assert report.to_json()["totals"]["replaced"] == 6 and "replaced 6 of 9 linear layers" in str(report)


def test_random_factors_need_no_projection_and_follow_the_seed(vit: nn.Module, planned: Planned) -> None:
    made = planned(patterns="(4,2,2,8),(2,2,2,16),(1,2,2,32)")  # not chainable
    with unchanged(vit), pytest.raises(ProjectionError, match=r"blocks.0.attn.qkv: .* not chainable; .* init='random'"):
        apply(made, vit)
    models, random = [copy.deepcopy(vit) for _ in range(3)], torch.get_rng_state()
    rows = [apply(made, model, init="random", seed=seed).rows[0] for model, seed in zip(models, (4, 4, 5), strict=True)]
    assert torch.equal(torch.get_rng_state(), random) and rows[0].relative_error == rows[1].relative_error != rows[2].relative_error
    parts, old = parts_of(models[0].get_submodule(rows[0].fqn)), vit.get_submodule(rows[0].fqn)
    assert not torch.equal(parts[0].factors[0], parts[1].factors[0])
    product = torch.cat([factors_to_dense([factor.detach().double() for factor in part.factors]) for part in parts])
    assert rows[0].relative_error == pytest.approx(float((old.weight - product).norm() / old.weight.norm()), rel=1e-5)
    assert torch.equal(torch.cat([part.bias for part in parts]), old.bias)


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


def test_densified_weights_are_the_products_rounded_once_and_the_plan_stays_until_then(vit: nn.Module, vit_plan: Plan) -> None:
    assert plan_of(vit) is None
    apply(vit_plan, vit)
    converted = copy.deepcopy(vit)
    with pytest.raises(SurgeryError, match=r"converted already \(6 layers, such as blocks.0.attn.qkv\); densify it first"):
        plan(vit)
    assert plan_of(vit) is vit_plan and plan_of(converted) == plan_of(pickle.loads(pickle.dumps(vit))) == vit_plan
    assert densify(vit) == 6 and plan_of(vit) is None
    for layer in vit_plan.replaced:
        parts, linear = parts_of(converted.get_submodule(layer.fqn)), vit.get_submodule(layer.fqn)
        assert type(linear) is nn.Linear
        factors = [[dense_factor(factor.detach().double()) for factor in part.factors] for part in parts]
        exact = torch.cat([left @ right for left, right in factors])
        rounding = torch.finfo(torch.float32).eps / 2  # one rounding to float32; float64 sums are far below that
        assert ((linear.weight.double() - exact).abs() <= 1.001 * rounding * exact.abs() + 1e-15).all()
        assert torch.equal(linear.bias, torch.cat([part.bias for part in parts]))
    assert all(row.relative_error < 1e-6 for row in apply(vit_plan, vit).replaced)


def test_a_dense_layer_has_the_dtypes_of_the_factors_and_the_bias_and_nothing_else_of_the_layer() -> None:
    layer = ButterflyLinear(monarch(32, 48))
    layer.bias = nn.Parameter(torch.ones(32, dtype=torch.bfloat16))
    layer.last = layer.weight * 2  # which no copy can hold
    linear = dense_layer(layer)
    assert linear.weight.dtype == torch.float32 and linear.bias.dtype == torch.bfloat16


def test_a_shared_module_is_replaced_under_all_its_names_and_stays_shared(vit: nn.Module) -> None:
    first, second = "blocks.0.mlp.fc1", "blocks.1.mlp.fc1"
    vit.blocks[1].mlp.fc1 = vit.blocks[0].mlp.fc1
    made = plan(vit)
    assert [(layer.fqn, layer.aliases, layer.calls) for layer in made.replaced if layer.aliases] == [(first, (second,), 2)]
    apply(made, vit)
    assert isinstance(vit.get_submodule(second), ButterflyLinear) and vit.get_submodule(second) is vit.get_submodule(first)
    assert densify(vit) == 5
    assert type(vit.get_submodule(second)) is nn.Linear and vit.get_submodule(second) is vit.get_submodule(first)


def test_convolutions_are_replaced_where_that_is_asked_for() -> None:
    model, x = mobile(), torch.zeros(2, 16, 8, 8)
    with pytest.raises(PlanError, match=r"conv1x1 \(2 layers\): it is a 1x1 convolution, replaced only where convs are asked for"):
        plan(model, example=x)
    made = plan(model, example=x, convs=True)
    model.up = nn.Conv2d(16, 64, 1, stride=2)
    with unchanged(model), pytest.raises(PlanError, match="layer up: the convolution has a stride"):
        apply(made, model)
    empty = mobile().to("meta")
    install(made, empty)
    assert isinstance(empty.up, ButterflyConv) and isinstance(empty.down, ButterflyConv)


def test_switches_are_set_back() -> None:
    model = beit()
    model.blocks[1].attn.qkv_bias_separate = True
    made = plan(model)
    for convert_by in (apply, install):
        convert_by(made, model)
        assert [block.attn.qkv_bias_separate for block in model.blocks] == [True, True]
        with pytest.raises(SurgeryError, match="densify it first"):
            convert_by(made, model)
        densify(copy.deepcopy(model))
        densify(model)
        assert [block.attn.qkv_bias_separate for block in model.blocks] == [False, True]


def hooked() -> nn.Module:
    model = nn.Sequential(ButterflyLinear(monarch(8, 8, 2)))
    model[0].register_forward_hook(lambda *_: None)
    return model


IMAGES = torch.randn(4, 3, 32, 32)


@pytest.mark.parametrize(
    ("call", "sentence"),
    [  # each is what a type checker would find
        (lambda _, __: flysurgery.plan("vit_tiny"), r"got str; build it first, as with timm.create_model\('vit_tiny'\)"),
        (lambda made, model: flysurgery.apply(model, made), "expected a plan and then a model, got VisionTransformer and Plan"),
        (lambda _, model: flysurgery.densify(model), "no converted layer"),
        (lambda _, __: flysurgery.densify(hooked()), "^0 has hooks, which a dense layer in its place would lose; remove them first"),
        (lambda plan, model: apply(plan, model, seed=-1), "seed must be a whole number from 0 to 4294967295, got -1"),
        (lambda _, model: flysurgery.plan(torch.compile(model)), r"give the model in it, model\._orig_mod"),
        (lambda made, model: flysurgery.apply(made, torch.compile(model)), r"give the model in it, model\._orig_mod"),
        (lambda _, __: flysurgery.densify(ButterflyLinear(monarch(8, 8, 2))), "itself a ButterflyLinear"),
        (lambda made, model: flysurgery.apply(made, model.to("meta")), "on the meta device"),
        (lambda _, __: flysurgery.load(None), "expected the folder of a converted model, got None"),  # pyright: ignore
        (lambda _, __: flysurgery.restore(None), "expected a torch.nn.Module to restore, got NoneType"),  # pyright: ignore
        (lambda made, model: flysurgery.apply(made, model, calibrate=IMAGES, reconstruct="x"), "reconstruct is True or a number"),  # pyright: ignore
        (lambda _, model: flysurgery.convert(model, measure="x"), "measure is True or a Setting, got 'x'"),  # pyright: ignore
        (lambda _, model: flysurgery.convert(model, calibrate=IMAGES, fidelity="x"), "fidelity is the least cosine .* got 'x'"),
        (lambda _, model: flysurgery.plan(model, patterns=3), "patterns are architectures, .* got 3"),  # pyright: ignore
        (lambda _, model: flysurgery.plan(model, per_layer={3: "dense"}), "per_layer maps regular expressions"),  # pyright: ignore
        (lambda _, model: flysurgery.plan(model, min_size=-1), "min_size is a whole number of features, got -1"),
        (lambda _, model: flysurgery.evaluate(model, [(IMAGES[..., :9], torch.ones(4, dtype=int))]), "the model fails on inputs of shape"),  # pyright: ignore
        (lambda _, model: flysurgery.plan(model, base=3), "base is the name of a dense model, .* got 3"),  # pyright: ignore
        (lambda _, model: flysurgery.save("folder", model), "expected a model and then a folder, got str and VisionTransformer"),
    ],
)
def test_arguments_of_another_kind(call: Callable[..., Any], sentence: str, vit: nn.Module, vit_plan: Plan) -> None:
    with pytest.raises(flysurgery.FlysurgeryError, match=sentence):
        call(vit_plan, vit)


def test_a_gpu_without_memory_stays_what_it_is(vit: nn.Module) -> None:
    def forward(x: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    vit.forward = forward  # type: ignore[method-assign]
    with pytest.raises(torch.OutOfMemoryError):  # which the command line has a sentence for
        flysurgery.evaluate(vit, [(IMAGES, torch.zeros(4, dtype=torch.int64))])


@pytest.mark.parametrize("options", [{}, {"calibrate": True, "reconstruct": 0.01}])
def test_a_parameter_that_stays_and_is_no_number_is_named(vit: nn.Module, vit_plan: Plan, many: Tensor, options: dict[str, Any]) -> None:
    vit.get_parameter("norm.weight").data[3] = torch.nan
    with unchanged(vit), pytest.raises(ProjectionError, match=r"^norm\.weight has NaN or infinite entries"):
        apply(vit_plan, vit, **(options | {"calibrate": many} if options else {}))


def test_times_are_measured_in_one_call(vit: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock, "medians_ms", lambda ways, inputs, **_: tuple(range(1, len(ways) + 1)))  # dense stands first
    with pytest.raises(PlanError, match=r"nothing is faster than dense here; .* would count as faster"):
        flysurgery.convert(vit, measure=True)


GOOD = Fidelity(102, 0.971, 0.954, 0.25, None, (("blocks.0", 0.11), ("blocks.1", 0.222)))
POOR = Fidelity(102, 0.912, 0.688, 0.75, 0.5, ())
DONE = Reconstruction(POOR, GOOD, 3120, 2900, 64, 60.4, ((0, 0.75), (2900, 0.25)))


@pytest.mark.parametrize(
    ("fidelity", "reconstruction", "remarks"),
    [
        (None, None, ["its fidelity is unknown"]),
        (POOR, replace(DONE, after=POOR, kept=0), ["no update was better", "its token cosine of 0.688 is below 0.9"]),
        (GOOD, DONE, ["error after each block: 0.110 0.222", "update 2900 was kept: relative error from 0.750 to 0.250"]),
        (replace(POOR, output_cosine=math.nan, relative_error=math.inf), None, ["its fidelity is no number"]),
    ],
)
def test_remarks_say_what_is_known_and_what_the_model_needs(fidelity: Any, reconstruction: Any, remarks: list[str]) -> None:
    report = Report((), 10, 5, 1.0, verified=True, fidelity=fidelity, reconstruction=reconstruction)
    assert all(words in found and found in str(report) for words, found in zip(remarks, report.remarks, strict=True))
    json.dumps(report.to_json(), allow_nan=False)


def fc1_of(model: nn.Module) -> nn.Module:
    return model.get_submodule("blocks.0.mlp.fc1")


def replaced_by(new: Callable[[], nn.Module]) -> Callable[[nn.Module], object]:
    return lambda model: setattr(model.get_submodule("blocks.0.mlp"), "fc1", new())


INTEGERS = nn.Parameter(torch.zeros(256, 64, dtype=torch.int8), requires_grad=False)
SPOILED: list[tuple[Callable[[Any], object], type[FlysurgeryError], str]] = [
    (lambda model: nn.utils.parametrizations.weight_norm(fc1_of(model)), PlanError, "its weight is parametrized .*change that first"),
    (lambda model: fc1_of(model).register_forward_hook(print), PlanError, "hooks, which a replacement would lose; change that first"),
    (lambda model: setattr(model.blocks[1].mlp.fc1, "weight", fc1_of(model).weight), PlanError, "shares a parameter with blocks.1.mlp.fc1"),
    (lambda model: setattr(model.blocks[1].mlp, "fc1", fc1_of(model)), PlanError, "goes by the names"),
    (replaced_by(lambda: nn.Conv2d(64, 256, 1)), PlanError, "expected an nn.Linear, the model has a Conv2d"),
    (replaced_by(lambda: nn.Linear(64, 128)), PlanError, "the plan says 256x64, the model has 128x64"),
    (lambda model: setattr(fc1_of(model), "bias", None), PlanError, "the model has no bias there, the plan says one"),
    (lambda model: delattr(model.blocks[0].mlp, "fc1"), PlanError, "the model has no module of that name"),
    (lambda model: setattr(fc1_of(model), "weight", INTEGERS), PlanError, "not a floating-point tensor"),
    (lambda model: fc1_of(model).bias.data.fill_(torch.inf), ProjectionError, "fc1: its bias has NaN or infinite entries"),
    (lambda model: flysurgery.convert(model, include="blocks.0.mlp.fc1"), SurgeryError, "densify it first"),
]
PLANS: list[tuple[dict[str, Any], type[FlysurgeryError], str]] = [
    ({"layers": ()}, PlanError, "replaces nothing"),
    ({"switches": (Switch("blocks.9", "qkv_bias_separate", True),)}, PlanError, "no such attribute"),
    ({"switches": (Switch("blocks.0.attn", "nonsense", True),)}, PlanError, "no such attribute"),
    ({"switches": (Switch("blocks.0.attn", "num_heads", True),)}, PlanError, "no switch but 2"),
    ({"example": None}, SurgeryError, "pass verify=False"),
    ({"example": (ExampleInput((2, 3, 32, 32), "softmax"),)}, FlysurgeryError, "unknown dtype 'softmax'"),
]


@pytest.mark.parametrize(("spoil", "kind", "message"), [*SPOILED, *PLANS])
def test_a_model_and_a_plan_that_do_not_fit(vit: nn.Module, vit_plan: Plan, spoil: Any, kind: type[Exception], message: str) -> None:
    if callable(spoil):
        spoil(vit)
    made = vit_plan if callable(spoil) else replace(vit_plan, **spoil)
    with unchanged(vit), pytest.raises(kind, match=message) as caught:
        apply(made, vit)
    assert "blocks.0.mlp.fc1" in str(caught.value) or not callable(spoil)


INTERRUPTED: dict[str, tuple[str, int, dict[str, Any]]] = {
    "the first projection": ("", 1, {}),
    "the last projection": ("", 6, {}),
    "in a new order": ("blocks.1.mlp.fc2", 0, {"sequential": True, "permute": True}),
    "reconstruction": ("reconstruction", 0, {"reconstruct": 60.0}),
    "the verifying forward": ("", 0, {}),
}


@pytest.mark.parametrize("when", INTERRUPTED)
def test_an_interruption(vit: nn.Module, vit_plan: Plan, many: Tensor, when: str) -> None:
    name, count, options = INTERRUPTED[when]

    def stop(done: int, total: int, said: str) -> None:
        if done == count or (name and said.startswith(name)):
            raise KeyboardInterrupt

    if when == "the verifying forward":
        vit.get_submodule("norm").register_forward_hook(lambda *_: stop(0, 0, ""))
    with unchanged(vit), pytest.raises(KeyboardInterrupt):
        apply(vit_plan, vit, progress=stop, **({"calibrate": many[:20]} | options if options else {}))


class Fragile(dict):
    """The children of a module; refuses to hold a converted one."""

    def __setitem__(self, name: str, module: nn.Module) -> None:
        if isinstance(module, ButterflyLinear | SplitLinear):
            raise MemoryError("no room for another module")
        super().__setitem__(name, module)


@pytest.mark.parametrize("parent", ["blocks.0.attn", "blocks.1.mlp"])
def test_a_failure_while_swapping(vit: nn.Module, vit_plan: Plan, parent: str) -> None:
    module = vit.get_submodule(parent)
    module._modules = Fragile(module._modules)
    with unchanged(vit), pytest.raises(MemoryError):
        apply(vit_plan, vit)


class Stubborn(Composed):
    """A parent whose second switch breaks when it is set."""

    second = property(lambda self: False)


def test_a_failure_while_switching() -> None:
    model = Stubborn(lambda self, x: self.linear(x), first=False, linear=nn.Linear(32, 32))
    made = plan(model, roles="head", example=torch.zeros(2, 3, 32))
    with unchanged(model), pytest.raises(AttributeError):
        apply(replace(made, switches=(Switch("", "first", True), Switch("", "second", True))), model)
    assert not model.first


def bypassing(self: Any, x: Tensor) -> Tensor:
    """Calls its linear layer only when nothing else is there; or reads what a converted one lacks."""
    x = self.norm(x) + torch.rand(())
    if isinstance(self.linear, nn.Linear):
        return self.linear(x)
    return x @ self.linear.get_parameter("weight") if self.breaks else x  # in a way that the walk cannot see


@pytest.mark.parametrize(
    ("breaks", "message"), [(True, "failed in its first forward.*weight"), (False, "not called in a forward.*: linear")]
)
def test_a_failure_in_the_verifying_forward(breaks: bool, message: str) -> None:
    model = Composed(bypassing, linear=nn.Linear(32, 32), norm=nn.BatchNorm1d(3), breaks=breaks)
    made = plan(model, roles="head", example=torch.zeros(2, 3, 32))
    with unchanged(model), pytest.raises(SurgeryError, match=message):
        apply(made, model)
    model = beit()
    wrong = replace(plan(model), example=(ExampleInput((2, 5, 32, 32), "float32"),))
    with unchanged(model), pytest.raises(SurgeryError, match="failed in its first forward"):  # which sets switches back as well
        apply(wrong, model)
