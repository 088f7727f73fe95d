"""A calibrated conversion: what the report says is what the model does, and a failure leaves the model alone."""

from __future__ import annotations

import copy

import pytest
import timm
import torch
from torch import Tensor, nn

from flysurgery.errors import DataError, OptionError, SurgeryError
from flysurgery.layers import SplitLinear
from flysurgery.surgery import Plan, Report, apply, convert
from tests.surgery.conftest import TOKENS, WIDTH
from tests.surgery.test_rollback import unchanged


def inputs_of(model: nn.Module, fqns: list[str], x: Tensor) -> dict[str, Tensor]:
    seen: dict[str, Tensor] = {}

    def see(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        seen[names[module]] = args[0]

    names = {model.get_submodule(fqn): fqn for fqn in fqns}
    hooks = [module.register_forward_pre_hook(see) for module in names]
    with torch.no_grad():
        model.eval()(x)
    for hook in hooks:
        hook.remove()
    return seen


def errors(report: Report) -> dict[str, tuple[float, float]]:
    found = {row.fqn: row.calibration for row in report.replaced}
    return {fqn: (each.output_error, each.plain_output_error) for fqn, each in found.items() if each is not None}


def test_reported_errors_are_those_of_the_modules_on_held_out_images(vit: nn.Module, vit_plan: Plan, many: Tensor) -> None:
    dense, plain = copy.deepcopy(vit), copy.deepcopy(vit)
    report = apply(vit_plan, vit, calibrate=many)
    apply(vit_plan, plain)
    held_out = many[4::5]
    for fqn, x in inputs_of(dense, [layer.fqn for layer in vit_plan.replaced], held_out).items():
        old, ours, theirs = (model.get_submodule(fqn) for model in (dense, vit, plain))
        with torch.no_grad():
            right = old(x)
            scale = float((right - old.bias).norm())
            measured = tuple(float((module(x) - right).norm()) / scale for module in (ours, theirs))
        assert errors(report)[fqn] == pytest.approx(measured, rel=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("permute", [False, True])
def test_a_gpu_gives_the_errors_of_the_cpu(vit: nn.Module, vit_plan: Plan, many: Tensor, permute: bool) -> None:
    there = copy.deepcopy(vit).cuda()
    found = errors(apply(vit_plan, there, calibrate=many.cuda(), permute=permute))
    assert all(parameter.is_cuda for parameter in there.parameters())
    for fqn, expected in errors(apply(vit_plan, vit, calibrate=many, permute=permute)).items():
        assert found[fqn] == pytest.approx(expected, rel=0.05 if permute else 1e-3)  # features that are nearly alike may change places


@pytest.mark.parametrize("sequential", [False, True])
def test_output_errors_fall_well_below_those_of_the_plain_projection(vit: nn.Module, many: Tensor, sequential: bool) -> None:
    report = convert(vit, calibrate=many, sequential=sequential)
    assert len(errors(report)) == 6
    assert all(ours < 0.8 * theirs for ours, theirs in errors(report).values()), errors(report)
    assert report.calibration is not None
    assert (report.calibration.samples, report.calibration.held_out, report.calibration.sequential) == (60, 12, sequential)
    assert report.verified and "calibrated with 60 samples" in str(report)


def test_the_whole_models_output_comes_nearer(vit: nn.Module, many: Tensor) -> None:
    models = [copy.deepcopy(vit) for _ in range(3)]
    convert(models[1])
    convert(models[2], calibrate=many[:50])
    with torch.no_grad():
        dense, plain, calibrated = (model.eval()(many[50:]) for model in models)
    assert float((calibrated - dense).norm()) < 0.7 * float((plain - dense).norm())


def test_a_sequential_calibration_sees_what_the_converted_blocks_make(vit: nn.Module, vit_plan: Plan, many: Tensor) -> None:
    at_once, one_by_one = copy.deepcopy(vit), copy.deepcopy(vit)
    apply(vit_plan, at_once, calibrate=many)
    apply(vit_plan, one_by_one, calibrate=many, sequential=True)
    same, other = "blocks.0.mlp.fc1.factors.0", "blocks.1.mlp.fc1.factors.0"
    assert torch.equal(at_once.get_parameter(same), one_by_one.get_parameter(same))
    assert not torch.equal(at_once.get_parameter(other), one_by_one.get_parameter(other))


def test_parts_of_a_split_projection_take_up_their_own_mean(vit: nn.Module, vit_plan: Plan, many: Tensor) -> None:
    dense = copy.deepcopy(vit)
    apply(vit_plan, vit, calibrate=many)
    new, old = vit.get_submodule("blocks.1.attn.qkv"), dense.get_submodule("blocks.1.attn.qkv")
    assert isinstance(new, SplitLinear)
    x = inputs_of(dense, ["blocks.1.attn.qkv"], many)["blocks.1.attn.qkv"]
    fitted = x[torch.arange(60) % 5 != 4]
    with torch.no_grad():
        assert torch.allclose(new(fitted).mean((0, 1)), old(fitted).mean((0, 1)), atol=1e-5)


def test_layers_without_bias_and_other_architectures_are_calibrated_too(toy: nn.Module) -> None:
    scales = torch.arange(1, WIDTH + 1) ** -1.0
    x = torch.randn(40, TOKENS, WIDTH, generator=torch.Generator().manual_seed(6)) * scales @ torch.ones(WIDTH, WIDTH).triu()
    report = convert(toy, arch="lowrank", calibrate=x, example=x[:2])
    assert len(errors(report)) == 6 and all(ours < 0.8 * theirs for ours, theirs in errors(report).values()), errors(report)
    assert toy.get_submodule("blocks.0.down").bias is None


def test_more_than_two_factors_are_projected_plainly_and_the_report_says_so(vit: nn.Module, many: Tensor) -> None:
    patterns = "(1,4,4,16),(4,4,4,4),(16,4,4,1)"
    report = convert(vit, include=r"attn\.qkv", patterns=patterns, calibrate=many)
    row = report.replaced[0].calibration
    assert row is not None and row.note is not None and "two factors" in row.note
    assert "two factors" in str(report)


def test_a_parent_that_reads_its_weight_is_switched_while_it_is_watched(many: Tensor) -> None:
    model = timm.create_model("beit_base_patch16_224", img_size=32, patch_size=8, depth=1, embed_dim=64, num_heads=2, num_classes=3)
    report = convert(model, roles="qkv", calibrate=many)
    assert errors(report)["blocks.0.attn.qkv"][0] < errors(report)["blocks.0.attn.qkv"][1]


def test_few_samples_are_shrunk_and_still_no_worse_than_plain(vit: nn.Module, many: Tensor) -> None:
    report = convert(vit, calibrate=many[:4])
    shares = [row.calibration.shrinkage for row in report.replaced if row.calibration is not None]
    assert min(shares) > 1e-3
    assert all(ours < 1.1 * theirs for ours, theirs in errors(report).values())


def test_what_cannot_be_calibrated_leaves_the_model_as_it_was(vit: nn.Module, vit_plan: Plan, many: Tensor) -> None:
    with unchanged(vit), pytest.raises(DataError, match=r"\(3, 32, 32\), got \(1, 32, 32\)"):
        apply(vit_plan, vit, calibrate=many[:, :1])
    with unchanged(vit), pytest.raises(DataError, match="61 were asked for and there are 60"):
        apply(vit_plan, vit, calibrate=many, samples=61)
    with unchanged(vit), pytest.raises(OptionError, match="options of calibration"):
        apply(vit_plan, vit, sequential=True)


def test_a_failure_in_the_last_block_takes_all_back(vit: nn.Module, vit_plan: Plan, many: Tensor) -> None:
    with torch.no_grad():
        vit.get_parameter("blocks.1.norm1.bias")[0] = torch.nan
    with unchanged(vit), pytest.raises(SurgeryError, match=r"layer blocks\.1\.attn\.qkv is given NaN"):
        apply(vit_plan, vit, calibrate=many, sequential=True)


def test_a_report_without_calibration_says_nothing_of_it(vit: nn.Module, vit_plan: Plan) -> None:
    document = apply(vit_plan, vit).to_json()
    assert document["calibration"] is None
    assert all(row["calibration"] is None for row in document["rows"])
