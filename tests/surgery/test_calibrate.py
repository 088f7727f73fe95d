"""A calibrated conversion, in the model's own order of features and in a better one: what the report says is what the model does."""

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn
from vit_pytorch import ViT

from flysurgery.calibration import Inputs, Samples, collect, samples_of
from flysurgery.errors import DataError, OptionError, SurgeryError
from flysurgery.surgery import Plan, Report, apply, convert, plan
from flysurgery.surgery.permuting import INDIFFERENT, SEPARATE, permute, shared_features
from flysurgery.walker import HEADS, HIDDEN_UNITS, QUERY_KEY, VALUE
from tests.support.models import VIT_PYTORCH, unchanged
from tests.surgery.conftest import Planned, beit
from tests.surgery.test_exact import mobile


@pytest.fixture(autouse=True)
def _twenty_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flysurgery.fidelity.reconstruction.affordable", lambda *_: 20)


def errors(report: Report) -> dict[str, tuple[float, float]]:
    rows = [row for row in report.replaced if row.calibration is not None]
    return {row.fqn: (row.calibration.output_error, row.calibration.plain_output_error) for row in rows}


def test_reported_errors_are_those_of_the_modules_on_held_out_images_and_fall(vit: nn.Module, vit_plan: Plan, many: Tensor) -> None:
    models = dense, plain, calibrated, one_by_one = [copy.deepcopy(vit).eval() for _ in range(4)]
    reports = [apply(vit_plan, calibrated, calibrate=many), apply(vit_plan, one_by_one, calibrate=many, sequential=True)]
    apply(vit_plan, plain)
    given: dict[nn.Module, Tensor] = {}
    for layer in vit_plan.replaced:
        dense.get_submodule(layer.fqn).register_forward_pre_hook(lambda module, args: given.update({module: args[0]}))
    with torch.no_grad():
        outputs = [model(many) for model in models]
        assert float((outputs[2] - outputs[0]).norm()) < 0.7 * float((outputs[1] - outputs[0]).norm())
        for layer in vit_plan.replaced:
            old, ours, theirs = (model.get_submodule(layer.fqn) for model in (dense, calibrated, plain))
            x, fitted = given[old][4::5], given[old][torch.arange(60) % 5 != 4]
            right = old(x)
            scale = float((right - old.bias).norm())
            measured = tuple(float((module(x) - right).norm()) / scale for module in (ours, theirs))
            assert errors(reports[0])[layer.fqn] == pytest.approx(measured, rel=1e-3)
            assert torch.allclose(ours(fitted).mean((0, 1)), old(fitted).mean((0, 1)), atol=1e-5), "each part takes up its own mean"
    for report, sequential in zip(reports, (False, True), strict=True):
        assert len(errors(report)) == 6 and all(ours < 0.8 * theirs for ours, theirs in errors(report).values()), errors(report)
        found = report.calibration
        assert found is not None and (found.samples, found.held_out, found.sequential) == (60, 12, sequential) and report.verified
    for number, same in ((0, True), (1, False)):  # a sequential calibration sees what the converted blocks make
        name = f"blocks.{number}.mlp.fc1.factors.0"
        assert torch.equal(calibrated.get_parameter(name), one_by_one.get_parameter(name)) == same


@pytest.mark.gpu
@pytest.mark.parametrize("permute", [False, True])
def test_a_gpu_gives_the_errors_of_the_cpu(vit: nn.Module, vit_plan: Plan, many: Tensor, permute: bool) -> None:
    there = copy.deepcopy(vit).cuda()
    found = errors(apply(vit_plan, there, calibrate=many.cuda(), permute=permute))
    assert all(parameter.is_cuda for parameter in there.parameters())
    for fqn, expected in errors(apply(vit_plan, vit, calibrate=many, permute=permute)).items():
        assert found[fqn] == pytest.approx(expected, rel=0.05 if permute else 1e-3)  # features that are nearly alike may change places


def test_layers_without_bias_and_other_kinds_are_calibrated_too(vit: nn.Module, many: Tensor) -> None:
    for block in vit.blocks:
        block.mlp.fc2.bias = None
    generator = torch.Generator().manual_seed(6)
    decay = 0.6 ** torch.arange(16)[:, None] * torch.randn(16, 16, generator=generator)
    channels = torch.einsum("bchw,cn->bnhw", torch.randn(40, 16, 8, 8, generator=generator), decay)
    for report, count, share in (
        (convert(vit, arch="lowrank", calibrate=many), 6, 0.8),
        (convert(mobile(), calibrate=channels, example=channels[:2], convs=True), 2, 0.95),
        (convert(beit(), roles="qkv", calibrate=many), 2, 1.0),  # its attention is switched while it is watched
    ):
        assert len(errors(report)) == count and all(ours < share * theirs for ours, theirs in errors(report).values()), errors(report)
    assert vit.get_submodule("blocks.0.mlp.fc2").bias is None


def test_what_cannot_be_calibrated_leaves_the_model_as_it_was(vit: nn.Module, vit_plan: Plan, many: Tensor) -> None:
    for kind, message, options in (
        (DataError, r"\(3, 32, 32\), got \(1, 32, 32\)", {"calibrate": many[:, :1]}),
        (OptionError, "sequential needs data", {"sequential": True}),
        (OptionError, "samples and reconstruct need data", {"samples": 5, "reconstruct": True}),
        (OptionError, "init must be projection or random, got 'zeros'", {"init": "zeros"}),
        (OptionError, "sequential and permute are options of the projection", {"calibrate": many, "init": "random", "permute": True}),
    ):
        with unchanged(vit), pytest.raises(kind, match=message):
            apply(vit_plan, vit, **options)
    with unchanged(vit), pytest.raises(SurgeryError, match="describes no example input to trace"):
        apply(replace(vit_plan, example=None), vit, calibrate=Samples(many), reconstruct=True, verify=False)
    with torch.no_grad():
        vit.get_parameter("blocks.1.norm1.weight").fill_(3e38)  # finite, unlike what it makes
    with unchanged(vit), pytest.raises(SurgeryError, match=r"layer blocks\.1\.attn\.qkv is given NaN"):
        apply(vit_plan, vit, calibrate=many, sequential=True)


def test_a_model_in_half_precision_is_permuted(vit: nn.Module, vit_plan: Plan, many: Tensor) -> None:
    report = apply(vit_plan, vit.bfloat16(), calibrate=many, permute=True)
    assert report.permutations and report.fidelity.output_cosine > 0.5  # pyright: ignore[reportOptionalMemberAccess]


@pytest.mark.parametrize("options", [{"sequential": True, "permute": True}, {"init": "random"}])
def test_reconstruction_fits_to_the_dense_model_from_before(vit: nn.Module, vit_plan: Plan, many: Tensor, options: dict[str, Any]) -> None:
    dense = copy.deepcopy(vit).eval()
    report = apply(vit_plan, vit, calibrate=many[:40], reconstruct=60.0, **options)
    found = report.reconstruction
    assert found.after == report.fidelity and found.updates == 20
    assert found.after.relative_error < found.before.relative_error
    with torch.no_grad():
        tokens, wanted = (model.eval().forward_features(many[4:40:5]) for model in (vit, dense))
    assert found.after.relative_error == pytest.approx(float((tokens - wanted).norm() / wanted.norm()), rel=1e-3)
    assert (report.calibration is None) == ("init" in options) and "--calibrate" not in str(report), "the data are given already"


ALL = ("qkv", "attn_out", "ffn_in", "ffn_out")


@pytest.fixture
def few(many: Tensor) -> Tensor:
    return many[:40]


TIMM: dict[str, Any] = {"img_size": 32, "patch_size": 8, "embed_dim": 48, "depth": 1, "num_heads": 3, "num_classes": 5}
WINDOWS: dict[str, Any] = {"img_size": 32, "depths": (1,), "num_heads": (3,), "embed_dim": 48, "window_size": 4, "num_classes": 5}

MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[str, ...]]] = {
    "vit": (lambda: timm.create_model("vit_tiny_patch16_224", **TIMM), ()),
    "rotary": (lambda: timm.create_model("vit_small_patch16_rope_ape_224", **TIMM), (QUERY_KEY,)),
    "swin": (lambda: timm.create_model("swin_tiny_patch4_window7_224", **WINDOWS), (HEADS,)),
    "cait": (lambda: timm.create_model("cait_xxs24_224", init_values=1.0, depth_token_only=1, **TIMM), (HEADS,)),
    "vit-pytorch": (lambda: ViT(**VIT_PYTORCH), ()),
}


@pytest.mark.parametrize(("name", "roles"), [("vit", None), *((name, ALL) for name in MODELS)])
@torch.no_grad()
def test_the_dense_model_in_the_new_order_computes_the_same(name: str, roles: tuple[str, ...] | None, few: Tensor) -> None:
    torch.manual_seed(0)
    make, tied = MODELS[name]
    model = make().eval()
    made = plan(model, roles=roles)
    calls = {layer.fqn: layer.calls for layer in made.replaced}
    inputs = {fqn: Inputs(moments, moments) for fqn, moments in collect(model, calls, few.split(8)).items()}
    found = permute(shared_features(made, model, samples_of(few)), made, model, made.replaced, inputs)
    heads = [each for each in found.outcomes.values() if each.what == HEADS]
    assert heads and all(each.moved and set(each.tied) == set(tied) for each in heads)
    new = copy.deepcopy(model)
    for fqn, linear in found.linears.items():
        new.set_submodule(fqn, linear)
    moved = [fqn for fqn in found.linears if not torch.equal(new.get_parameter(f"{fqn}.weight"), model.get_parameter(f"{fqn}.weight"))]
    assert sum(fqn.endswith(("qkv", "attn.proj", "to_out.0")) for fqn in moved) == 2
    right = model(few)
    assert float((new(few) - right).abs().max()) < 1e-5 * float(right.abs().max())
    again = collect(new, calls, few.split(8))
    assert all(torch.allclose(found.inputs[fqn].fit.mean, again[fqn].mean, atol=1e-5) for fqn in calls)


def test_errors_fall_in_each_group_and_the_report_says_by_how_much(vit: nn.Module, planned: Planned, few: Tensor) -> None:
    report = apply(planned(roles=ALL), vit, calibrate=few, sequential=True, permute=True)
    assert sorted(each.what for each in report.permutations) == [HEADS] * 2 + [HIDDEN_UNITS] * 2
    for each in report.permutations:
        assert each.moved and not each.tied
        assert sum(layer.after**2 for layer in each.layers) < sum(layer.before**2 for layer in each.layers)
    assert "in a new order" in str(report) and len(report.to_json()["permutations"]) == 4


def tied(report: Report, what: str) -> list[set[str]]:
    return [set(each.tied.values()) for each in report.permutations if each.what == what]


def test_features_without_an_order_of_their_own_stay_and_the_report_says_why(vit: nn.Module, planned: Planned, few: Tensor) -> None:
    low_rank = apply(planned("lowrank"), copy.deepcopy(vit), calibrate=few, permute=True)
    assert not any(each.moved for each in low_rank.permutations)
    assert tied(low_rank, HEADS) == tied(low_rank, HIDDEN_UNITS) == [{INDIFFERENT}] * 2
    whole = apply(planned(include=r"attn\.qkv", patterns="(1,48,16,4),(4,16,16,1)"), vit, calibrate=few, permute=True)
    assert [set(each.tied) for each in whole.permutations] == [{HEADS, QUERY_KEY, VALUE}] * 2
    model = ViT(**VIT_PYTORCH)  # whose names put the output projection into a block of its own
    made = plan(model, roles=("qkv", "attn_out"))
    assert SEPARATE in tied(apply(made, model, calibrate=few, sequential=True, permute=True), HEADS)[0]
