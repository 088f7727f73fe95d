"""What a conversion does to a model, and what it leaves as it was."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from flysurgery.factors import factors_to_dense
from flysurgery.layers import ButterflyLinear, SplitLinear
from flysurgery.projection import project
from flysurgery.surgery import Plan, apply, convert, plan, plan_of


def test_factors_are_the_projections_and_biases_stay(vit: nn.Module, vit_plan: Plan) -> None:
    dense = copy.deepcopy(vit)
    apply(vit_plan, vit)
    for layer in vit_plan.replaced:
        old, new = dense.get_submodule(layer.fqn), vit.get_submodule(layer.fqn)
        for part in layer.parts:
            module = new if part.name is None else new.get_submodule(part.name)
            assert isinstance(module, ButterflyLinear)
            assert part.architecture is not None
            assert module.architecture == part.architecture
            expected = project(old.weight.detach()[part.start : part.stop], part.architecture).factors
            assert all(torch.equal(a, b) for a, b in zip(module.factors, expected, strict=True))
            assert torch.equal(module.bias, old.bias[part.start : part.stop])
    kept = {name for name in dense.state_dict() if not any(name.startswith(f"{layer.fqn}.") for layer in vit_plan.replaced)}
    assert kept
    assert all(torch.equal(dense.state_dict()[name], vit.state_dict()[name]) for name in kept)


def test_names_in_the_state_are_those_of_the_checkpoint_format(vit: nn.Module, vit_plan: Plan) -> None:
    apply(vit_plan, vit)
    names = [name for name in vit.state_dict() if name.startswith(("blocks.0.attn.qkv", "blocks.0.mlp.fc1"))]
    assert names == [
        *(f"blocks.0.attn.qkv.{part}.{tensor}" for part in "qkv" for tensor in ("bias", "factors.0", "factors.1")),
        *(f"blocks.0.mlp.fc1.{tensor}" for tensor in ("bias", "factors.0", "factors.1")),
    ]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_dtype_mode_and_requires_grad_stay(vit: nn.Module, vit_plan: Plan, dtype: torch.dtype) -> None:
    vit.to(dtype)
    vit.blocks[0].eval()
    vit.blocks[0].mlp.fc1.weight.requires_grad_(False)
    vit.blocks[1].attn.qkv.bias.requires_grad_(False)
    apply(vit_plan, vit)
    fc1, other = vit.get_submodule("blocks.0.mlp.fc1"), vit.get_submodule("blocks.1.mlp.fc1")
    qkv = vit.get_submodule("blocks.1.attn.qkv")
    assert {parameter.dtype for parameter in vit.parameters()} == {dtype}
    assert [module.training for module in (vit, fc1, other, qkv, *qkv.children())] == [True, False, True, True, True, True, True]
    assert {name: parameter.requires_grad for name, parameter in fc1.named_parameters()} == {
        "bias": True,
        "factors.0": False,
        "factors.1": False,
    }
    assert all(parameter.requires_grad != name.endswith("bias") for name, parameter in qkv.named_parameters())


def test_random_state_batch_statistics_and_modes_stay(toy: nn.Module, toy_input: Tensor) -> None:
    toy.train()
    toy.blocks[1].eval()
    modes = [module.training for module in toy.modules() if not list(module.children())]
    buffers = {name: buffer.clone() for name, buffer in toy.named_buffers()}
    random, threads = torch.get_rng_state(), torch.get_num_threads()
    apply(plan(toy, example=toy_input), toy)
    assert torch.equal(torch.get_rng_state(), random)
    assert torch.get_num_threads() == threads
    assert buffers
    assert all(torch.equal(buffer, buffers[name]) for name, buffer in toy.named_buffers())
    assert [toy.blocks[i].norm.training for i in (0, 1)] == [True, False]
    assert True in modes
    assert False in modes


def test_report_counts_and_errors(vit: nn.Module, vit_plan: Plan) -> None:
    dense = copy.deepcopy(vit)
    report = apply(vit_plan, vit)
    rows = {row.fqn: row for row in report.rows}
    assert list(rows) == [layer.fqn for layer in vit_plan.layers]
    for layer in vit_plan.replaced:
        weight = dense.get_parameter(f"{layer.fqn}.weight").detach().double()
        module = vit.get_submodule(layer.fqn)
        parts = module.children() if isinstance(module, SplitLinear) else [module]
        product = torch.cat([factors_to_dense([factor.detach().double() for factor in part.factors]) for part in parts])
        row = rows[layer.fqn]
        assert row.relative_error == pytest.approx(float((weight - product).norm() / weight.norm()))
        assert row.energy_kept == pytest.approx(1 - float((weight - product).norm() / weight.norm()) ** 2)
        assert row.params_after == sum(parameter.numel() for parameter in module.parameters())
        assert row.params_before == layer.params_before
        assert row.seconds is not None
    assert [part.name for part in rows["blocks.0.attn.qkv"].parts] == ["q", "k", "v"]
    head = rows["head"]
    assert head.reason is not None
    assert (head.status, head.reason.code, head.relative_error, head.seconds) == ("keep", "head", None, None)
    assert head.params_before == head.params_after == 64 * 7 + 7
    assert report.model_params_before == sum(parameter.numel() for parameter in dense.parameters())
    assert report.model_params_after == sum(parameter.numel() for parameter in vit.parameters())
    assert (
        report.totals["replaced_params_before"] - report.totals["replaced_params_after"]
        == report.model_params_before - report.model_params_after
    )
    assert report.totals["linear_flops_before"] == sum(layer.flops_before for layer in vit_plan.layers)


def test_report_as_json_and_text(vit: nn.Module, vit_plan: Plan) -> None:
    report = apply(vit_plan, vit)
    data = json.loads(json.dumps(report.to_json()))
    row = next(row for row in data["rows"] if row["fqn"] == "blocks.0.attn.qkv")
    assert {"fqn", "role", "status", "reason", "architecture", "relative_error", "energy_kept", "seconds"} < row.keys()
    assert [part["name"] for part in row["parts"]] == ["q", "k", "v"]
    assert data["totals"]["replaced"] == 6
    assert data["verified"] is True
    text = str(report)
    assert "replaced 6 of 9 linear layers" in text
    assert any(line.split()[:4] == ["blocks.*.mlp.fc2", "2", "ffn_out", "64x256"] for line in text.splitlines())
    assert "head: " in text


def test_progress_counts_up_to_the_number_of_layers(vit: nn.Module, vit_plan: Plan) -> None:
    seen: list[tuple[int, int, str]] = []
    apply(vit_plan, vit, progress=lambda done, total, fqn: seen.append((done, total, fqn)))
    assert seen == [(i, 6, layer.fqn) for i, layer in enumerate(vit_plan.replaced, start=1)]


def test_without_verification_no_forward_runs(vit: nn.Module, vit_plan: Plan) -> None:
    ran = []
    vit.register_forward_hook(lambda *_: ran.append(1))
    ran.clear()
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
    assert plan_of(copy.deepcopy(vit)) == vit_plan
    assert plan_of(pickle.loads(pickle.dumps(vit))) == vit_plan


def test_a_shared_module_is_replaced_under_all_its_names(toy: nn.Module, toy_input: Tensor) -> None:
    toy.blocks[1].up = toy.blocks[0].up
    made = plan(toy, example=toy_input)
    shared = [layer for layer in made.replaced if layer.aliases]
    assert [(layer.fqn, layer.aliases, layer.calls) for layer in shared] == [("blocks.0.up", ("blocks.1.up",), 2)]
    apply(made, toy)
    assert isinstance(toy.get_submodule("blocks.1.up"), ButterflyLinear)
    assert toy.get_submodule("blocks.1.up") is toy.get_submodule("blocks.0.up")


def test_a_model_in_no_library_is_converted(toy: nn.Module, toy_input: Tensor, make_exact: Callable[[Plan, nn.Module], None]) -> None:
    made = plan(toy, example=toy_input)
    assert len(made.replaced) == 6
    make_exact(made, toy)
    dense = copy.deepcopy(toy)
    report = apply(made, toy)
    assert all(row.relative_error < 1e-6 for row in report.replaced if row.relative_error is not None)
    gradients = []
    for model in (dense, toy):
        x = toy_input.clone().requires_grad_()
        model.eval()(x).square().sum().backward()
        gradients.append(x.grad)
    assert gradients[0] is not None
    assert gradients[1] is not None
    assert not torch.equal(gradients[0], gradients[1])
