"""What apply says of the converted model beside the dense one, and what it does about it."""

from __future__ import annotations

import copy

import pytest
import timm
import torch
from torch import Tensor, nn

import flysurgery
from flysurgery.calibration import Samples
from flysurgery.errors import OptionError, SurgeryError


@pytest.fixture(autouse=True)
def _twenty_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flysurgery.fidelity.reconstruction._affordable", lambda *_: 20)


def images(count: int) -> Tensor:
    small = torch.randn(count, 3, 5, 5, generator=torch.Generator().manual_seed(0))
    return nn.functional.interpolate(small, (32, 32), mode="bicubic")


def model() -> nn.Module:
    torch.manual_seed(0)
    return timm.create_model("vit_tiny_patch16_224", embed_dim=96, num_heads=3, depth=2, img_size=32, num_classes=5).eval()


def test_without_data_nothing_is_known() -> None:
    report = flysurgery.convert(model())
    assert report.fidelity is None and report.reconstruction is None


def test_calibration_measures_the_fidelity_by_the_samples_held_out() -> None:
    dense, network = model(), model()
    x = images(25)
    report = flysurgery.convert(network, calibrate=x)
    held_out = x[4::5]
    with torch.no_grad():
        expected = nn.functional.cosine_similarity(network(held_out), dense(held_out), dim=1).mean()
    assert report.fidelity is not None and report.fidelity.samples == 5
    assert report.fidelity.output_cosine == pytest.approx(float(expected), abs=1e-5)
    assert [name for name, _ in report.fidelity.blocks] == ["blocks.0", "blocks.1"]


@pytest.mark.parametrize("permute", [False, True])
def test_reconstruction_fits_to_the_dense_model_from_before(permute: bool) -> None:
    dense, network = model(), model()
    x = images(40)
    report = flysurgery.convert(network, calibrate=x, sequential=True, permute=permute, reconstruct=60.0)
    found = report.reconstruction
    assert found is not None and found.after == report.fidelity and found.updates == 20
    assert found.after.relative_error < found.before.relative_error
    with torch.no_grad():
        tokens, wanted = (each.forward_features(x[4::5]) for each in (network, dense))
    assert found.after.relative_error == pytest.approx(float((tokens - wanted).norm() / wanted.norm()), rel=1e-3)


def test_an_interrupted_reconstruction_takes_the_conversion_back_with_it() -> None:
    network = model()
    before, kinds = copy.deepcopy(network.state_dict()), [type(each) for each in network.modules()]

    def stop(done: int, total: int, name: str) -> None:
        if name.startswith("reconstruction"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        flysurgery.convert(network, calibrate=images(20), reconstruct=60.0, progress=stop)
    assert [type(each) for each in network.modules()] == kinds
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())


def test_reconstruction_needs_data_a_positive_budget_and_a_known_input() -> None:
    with pytest.raises(OptionError, match="reconstruct are options of calibration"):
        flysurgery.convert(model(), reconstruct=True)
    network = model()
    with pytest.raises(OptionError, match="minutes must be a positive number"):
        flysurgery.convert(network, calibrate=images(20), reconstruct=0.0)
    assert flysurgery.convert(network).replaced
    plan = flysurgery.plan(model())
    blind = type(plan)(plan.layers, plan.switches, plan.base, plan.base_args, None)
    with pytest.raises(SurgeryError, match="describes no example input to trace"):
        flysurgery.apply(blind, model(), calibrate=Samples(images(20)), reconstruct=True, verify=False)
