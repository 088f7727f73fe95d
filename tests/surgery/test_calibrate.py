"""A calibrated conversion: what the report says is what the model does, and a failure leaves the model alone."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from flysurgery.calibration import Samples
from flysurgery.errors import DataError, OptionError, SurgeryError
from flysurgery.inference import convert
from flysurgery.layers import SplitLinear
from flysurgery.surgery import Plan, Report, apply, plan
from tests.surgery.conftest import beit, inputs_of, interrupt_at, unchanged
from tests.surgery.test_apply import Mobile


@pytest.fixture(autouse=True)
def _twenty_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flysurgery.fidelity.reconstruction._affordable", lambda *_: 20)


def errors(report: Report) -> dict[str, tuple[float, float]]:
    found = {row.fqn: row.calibration for row in report.replaced}
    return {fqn: (each.output_error, each.plain_output_error) for fqn, each in found.items() if each is not None}


def test_reported_errors_are_those_of_the_modules_on_held_out_images(vit: nn.Module, vit_plan: Plan, many: Tensor) -> None:
    models = dense, plain, calibrated = [copy.deepcopy(vit) for _ in range(3)]
    report = apply(vit_plan, calibrated, calibrate=many)
    apply(vit_plan, plain)
    fqns = [layer.fqn for layer in vit_plan.replaced]
    for fqn, x in inputs_of(dense, fqns, many[4::5]).items():
        old, ours, theirs = (model.get_submodule(fqn) for model in (dense, calibrated, plain))
        with torch.no_grad():
            right = old(x)
            scale = float((right - old.bias).norm())
            measured = tuple(float((module(x) - right).norm()) / scale for module in (ours, theirs))
        assert errors(report)[fqn] == pytest.approx(measured, rel=1e-3)
    x = inputs_of(dense, ["blocks.1.attn.qkv"], many)["blocks.1.attn.qkv"][torch.arange(60) % 5 != 4]
    new, old = (model.get_submodule("blocks.1.attn.qkv") for model in (calibrated, dense))
    assert isinstance(new, SplitLinear)  # whose parts take up their own mean
    with torch.no_grad():
        assert torch.allclose(new(x).mean((0, 1)), old(x).mean((0, 1)), atol=1e-5)
        outputs = [model.eval()(many) for model in models]
        assert float((outputs[2] - outputs[0]).norm()) < 0.7 * float((outputs[1] - outputs[0]).norm())


@pytest.mark.gpu
@pytest.mark.parametrize("permute", [False, True])
def test_a_gpu_gives_the_errors_of_the_cpu(vit: nn.Module, vit_plan: Plan, many: Tensor, permute: bool) -> None:
    there = copy.deepcopy(vit).cuda()
    found = errors(apply(vit_plan, there, calibrate=many.cuda(), permute=permute))
    assert all(parameter.is_cuda for parameter in there.parameters())
    for fqn, expected in errors(apply(vit_plan, vit, calibrate=many, permute=permute)).items():
        assert found[fqn] == pytest.approx(expected, rel=0.05 if permute else 1e-3)  # features that are nearly alike may change places


def test_errors_fall_and_a_sequential_calibration_sees_what_the_converted_blocks_make(vit: nn.Module, many: Tensor) -> None:
    models = {sequential: copy.deepcopy(vit) for sequential in (False, True)}
    for sequential, model in models.items():
        report = convert(model, calibrate=many, sequential=sequential)
        assert len(errors(report)) == 6
        assert all(ours < 0.8 * theirs for ours, theirs in errors(report).values()), errors(report)
        assert report.calibration is not None
        assert (report.calibration.samples, report.calibration.held_out, report.calibration.sequential) == (60, 12, sequential)
        assert report.verified and "calibrated with 60 samples" in str(report)
    for name, same in (("blocks.0.mlp.fc1.factors.0", True), ("blocks.1.mlp.fc1.factors.0", False)):
        assert torch.equal(*(model.get_parameter(name) for model in models.values())) == same


def test_layers_without_bias_and_other_kinds_are_calibrated_too(vit: nn.Module, many: Tensor) -> None:
    for block in vit.blocks:
        block.mlp.fc2.bias = None
    generator = torch.Generator().manual_seed(6)
    decay = 0.6 ** torch.arange(16)[:, None] * torch.randn(16, 16, generator=generator)
    channels = torch.einsum("bchw,cn->bnhw", torch.randn(40, 16, 8, 8, generator=generator), decay)
    for report, count, share in (
        (convert(vit, arch="lowrank", calibrate=many), 6, 0.8),
        (convert(Mobile(), calibrate=channels, example=channels[:2], convs=True), 2, 0.95),
        (convert(beit(), roles="qkv", calibrate=many), 2, 1.0),  # its attention is switched while it is watched
    ):
        assert len(errors(report)) == count and all(ours < share * theirs for ours, theirs in errors(report).values()), errors(report)
    assert vit.get_submodule("blocks.0.mlp.fc2").bias is None


def test_more_than_two_factors_are_projected_plainly_and_the_report_says_so(vit: nn.Module, many: Tensor) -> None:
    patterns = "(1,4,4,16),(4,4,4,4),(16,4,4,1)"
    report = convert(vit, include=r"attn\.qkv", patterns=patterns, calibrate=many)
    row = report.replaced[0].calibration
    assert row is not None and row.note is not None and "two factors" in row.note
    assert "two factors" in str(report)


def test_few_samples_are_shrunk_and_still_no_worse_than_plain(vit: nn.Module, many: Tensor) -> None:
    report = convert(vit, calibrate=many[:4])
    assert all(row.calibration is not None and row.calibration.shrinkage > 1e-3 for row in report.replaced)
    assert all(ours < 1.1 * theirs for ours, theirs in errors(report).values())


def test_what_cannot_be_calibrated_leaves_the_model_as_it_was(vit: nn.Module, vit_plan: Plan, many: Tensor) -> None:
    for kind, message, options in (
        (DataError, r"\(3, 32, 32\), got \(1, 32, 32\)", {"calibrate": many[:, :1]}),
        (DataError, "61 were asked for and there are 60", {"calibrate": many, "samples": 61}),
        (OptionError, "options of calibration", {"sequential": True}),
        (OptionError, "reconstruct are options of calibration", {"reconstruct": True}),
        (OptionError, "minutes must be a positive number", {"calibrate": many, "reconstruct": 0.0}),
    ):
        with unchanged(vit), pytest.raises(kind, match=message):
            apply(vit_plan, vit, **options)
    with unchanged(vit), pytest.raises(SurgeryError, match="describes no example input to trace"):
        apply(replace(vit_plan, example=None), vit, calibrate=Samples(many), reconstruct=True, verify=False)
    with torch.no_grad():
        vit.get_parameter("blocks.1.norm1.bias")[0] = torch.nan
    with unchanged(vit), pytest.raises(SurgeryError, match=r"layer blocks\.1\.attn\.qkv is given NaN"):
        apply(vit_plan, vit, calibrate=many, sequential=True)


def test_calibration_measures_the_fidelity_by_the_samples_held_out(vit: nn.Module, vit_plan: Plan, many: Tensor) -> None:
    dense = copy.deepcopy(vit).eval()
    found = apply(vit_plan, vit, calibrate=many).fidelity
    held_out = many[4::5]
    with torch.no_grad():
        expected = nn.functional.cosine_similarity(vit.eval()(held_out), dense(held_out), dim=1).mean()
    assert found is not None and found.samples == 12
    assert found.output_cosine == pytest.approx(float(expected), abs=1e-5)
    assert [name for name, _ in found.blocks] == ["blocks.0", "blocks.1"]


def test_reconstruction_fits_to_the_dense_model_from_before(vit: nn.Module, many: Tensor) -> None:
    dense = copy.deepcopy(vit).eval()
    report = convert(vit, calibrate=many[:40], sequential=True, permute=True, reconstruct=60.0)
    found = report.reconstruction
    assert found is not None and found.after == report.fidelity and found.updates == 20
    assert found.after.relative_error < found.before.relative_error
    with torch.no_grad():
        tokens, wanted = (model.eval().forward_features(many[4:40:5]) for model in (vit, dense))
    assert found.after.relative_error == pytest.approx(float((tokens - wanted).norm() / wanted.norm()), rel=1e-3)


def test_an_interrupted_reconstruction_takes_the_conversion_back_with_it(vit: nn.Module, many: Tensor) -> None:
    made = plan(vit)
    stop = interrupt_at(lambda _, name: name.startswith("reconstruction"))
    with unchanged(vit), pytest.raises(KeyboardInterrupt):
        apply(made, vit, calibrate=many[:20], reconstruct=60.0, progress=stop)
