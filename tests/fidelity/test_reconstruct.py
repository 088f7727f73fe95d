"""Reconstruction: it brings a converted model closer, is never worse than its start, and leaves nothing behind when it is stopped."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace

import pytest
import timm
import torch
from torch import Tensor, nn
from vit_pytorch import ViT

import flysurgery
from flysurgery.calibration import Samples
from flysurgery.errors import DataError, OptionError, SurgeryError
from flysurgery.fidelity import Settings, measure_fidelity, reconstruct
from flysurgery.fidelity.views import Source
from flysurgery.walker import Cut, find_cuts, survey

SHORT = Settings(minutes=60, batch=8)


@pytest.fixture(autouse=True)
def _sixty_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the machine is doing: time decides no test."""
    monkeypatch.setattr("flysurgery.fidelity.reconstruction._affordable", lambda *_: 60)


def images(count: int, seed: int = 0) -> Tensor:
    """Smooth random images: neighbouring pixels are alike, as in photographs."""
    small = torch.randn(count, 3, 5, 5, generator=torch.Generator().manual_seed(seed))
    return nn.functional.interpolate(small, (32, 32), mode="bicubic")


def timm_model() -> nn.Module:
    torch.manual_seed(0)
    return timm.create_model("vit_tiny_patch16_224", depth=2, img_size=32, num_classes=5).eval()


def vit_pytorch_model() -> nn.Module:
    torch.manual_seed(0)
    return ViT(image_size=32, patch_size=16, num_classes=5, dim=96, depth=2, heads=2, dim_head=24, mlp_dim=192).eval()


def pair(make: object = timm_model) -> tuple[nn.Module, nn.Module, Sequence[Cut]]:
    assert callable(make)
    student, teacher = make(), make()
    cuts = find_cuts(survey(teacher))
    flysurgery.convert(student)
    return student, teacher, cuts


@pytest.mark.parametrize("make", [timm_model, vit_pytorch_model])
def test_it_brings_outputs_and_blocks_closer_and_says_so(make: object) -> None:
    student, teacher, cuts = pair(make)
    samples = Samples(images(40))
    done = reconstruct(student, teacher, samples, cuts, SHORT)
    assert done.after.relative_error < 0.95 * done.before.relative_error
    assert done.after.blocks[0][1] < done.before.blocks[0][1]
    measured = measure_fidelity(student, teacher, samples.held_out(), cuts)
    assert measured.relative_error == pytest.approx(done.after.relative_error, rel=1e-4)
    assert done.kept in [update for update, _ in done.history] and done.updates >= done.kept > 0
    unseen = images(20, seed=7)
    with torch.no_grad():
        fresh, _, _ = pair(make)
        before, after = ((each(unseen) - teacher(unseen)).norm() for each in (fresh, student))
    assert after < before


def test_what_comes_before_the_first_block_and_what_is_frozen_stays() -> None:
    student, teacher, cuts = pair()
    student.blocks[1].attn.proj.weight.requires_grad_(False)
    before = copy.deepcopy(student.state_dict())
    reconstruct(student, teacher, Samples(images(20)), cuts, SHORT)
    changed = {name for name, value in student.state_dict().items() if not torch.equal(value, before[name])}
    assert not any(name.startswith(("patch_embed", "pos_embed", "cls_token")) for name in changed)
    assert "blocks.1.attn.proj.weight" not in changed
    assert {"blocks.0.norm1.weight", "blocks.0.mlp.fc1.factors.0", "blocks.1.attn.proj.bias", "norm.weight"} <= changed


@pytest.mark.parametrize(
    ("inputs", "rate"), [(images(20), 100.0), (torch.full((20, 3, 32, 32), 0.3), SHORT.rate)], ids=["too fast", "of one colour"]
)
def test_it_is_never_worse_than_its_start(inputs: Tensor, rate: float) -> None:
    student, teacher, cuts = pair()
    before = copy.deepcopy(student.state_dict())
    done = reconstruct(student, teacher, Samples(inputs), cuts, replace(SHORT, rate=rate))
    assert done.after.relative_error <= done.before.relative_error
    if rate == 100.0:
        assert done.kept == 0 and done.after == done.before
        assert all(torch.equal(value, before[name]) for name, value in student.state_dict().items())


def test_an_interruption_leaves_the_model_as_it_was() -> None:
    student, teacher, cuts = pair()
    before = copy.deepcopy(student.state_dict())
    state = torch.get_rng_state()

    def stop(done: int, total: int, text: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        reconstruct(student, teacher, Samples(images(20)), cuts, SHORT, progress=stop)
    assert all(torch.equal(value, before[name]) for name, value in student.state_dict().items())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in [*student.modules(), *teacher.modules()])
    assert torch.equal(torch.get_rng_state(), state)


def test_one_seed_gives_one_result() -> None:
    results = []
    for seed in (3, 3, 4):
        student, teacher, cuts = pair()
        torch.manual_seed(len(results))  # the caller's seed plays no part
        reconstruct(student, teacher, Samples(images(20)), cuts, replace(SHORT, seed=seed))
        results.append(torch.cat([parameter.detach().flatten() for parameter in student.parameters()]))
    assert torch.equal(results[0], results[1]) and not torch.equal(results[0], results[2])


def test_the_budget_says_how_many_updates_there_are_and_a_slow_machine_ends_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flysurgery.fidelity.reconstruction._affordable", lambda *_: 10**9)
    student, teacher, cuts = pair()
    done = reconstruct(student, teacher, Samples(images(20)), cuts, Settings(minutes=0.02, batch=2))
    assert done.updates < 10**6 and done.history[-1][0] == done.updates


def test_models_that_cannot_be_fitted_are_one_sentence_each() -> None:
    student, teacher, cuts = pair()
    samples, spoilt = Samples(images(20)), copy.deepcopy(student)
    with torch.no_grad():
        spoilt.norm.weight.fill_(float("nan"))
    with pytest.raises(SurgeryError, match="no place where one tensor carries everything on"):
        reconstruct(student, teacher, samples, (), SHORT)
    with pytest.raises(SurgeryError, match=r"too small for weights in torch.bfloat16; convert the model in float32"):
        reconstruct(copy.deepcopy(student).bfloat16(), teacher, samples, cuts, SHORT)
    with pytest.raises(DataError, match="no finite numbers"):
        reconstruct(spoilt, teacher, samples, cuts, SHORT)
    with pytest.raises(SurgeryError, match="requires_grad=False"):
        reconstruct(student.requires_grad_(False), teacher, samples, cuts, SHORT)


@pytest.mark.parametrize("minutes", [0.0, -1.0, float("nan"), float("inf")])
def test_a_budget_is_a_positive_number(minutes: float) -> None:
    with pytest.raises(OptionError, match="minutes must be a positive number"):
        Settings(minutes=minutes)


def test_pictures_that_do_not_fit_come_batch_by_batch() -> None:
    inputs = torch.arange(9.0).view(9, 1, 1, 1).expand(9, 1, 2, 2)
    source = Source(Samples(inputs).to_view(), 4, torch.device("cpu"))
    source._stays, source._here = False, source._taken()
    place, seen = source._here.canvas.data_ptr(), set()
    for _ in range(20):
        source.advance()
        here, chosen = source.draw()
        assert here.canvas.data_ptr() == place and len(chosen) == 4
        seen |= set(here.canvas[chosen].flatten().tolist())
    assert seen == {float(number) for number in range(9) if number % 5 != 4}


@pytest.mark.gpu
def test_on_cuda_the_model_gives_what_was_measured_and_nothing_that_was_packed_before() -> None:
    student, teacher, cuts = pair()
    student, teacher, samples = student.cuda(), teacher.cuda(), Samples(images(40))
    first = measure_fidelity(student, teacher, samples.held_out(), cuts)
    done = reconstruct(student, teacher, samples, cuts, SHORT)
    assert done.before == first and done.after.relative_error < done.before.relative_error
    measured = measure_fidelity(student, teacher, samples.held_out(), cuts)
    assert measured.relative_error == pytest.approx(done.after.relative_error, rel=1e-3)
    on_cpu = measure_fidelity(student.cpu(), teacher.cpu(), samples.held_out(), cuts)
    assert on_cpu.relative_error == pytest.approx(done.after.relative_error, rel=1e-2)
