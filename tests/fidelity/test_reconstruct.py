"""Reconstruction: it brings a converted model closer, is never worse than its start, and leaves nothing behind when it is stopped."""

import copy
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn
from vit_pytorch import ViT

import flysurgery
from flysurgery.calibration import Samples
from flysurgery.errors import DataError, OptionError, SurgeryError
from flysurgery.fidelity import Settings, measure_fidelity, reconstruct, reconstruction
from flysurgery.fidelity.settings import FUSED_FROM_MINUTES
from flysurgery.inference import clock, is_optimized
from flysurgery.walker import Cut, find_cuts, survey
from tests.support.models import vit
from tests.support.processes import two_processes

SHORT = Settings(minutes=60, batch=8)
Make = Callable[[], nn.Module]


@pytest.fixture(autouse=True)
def _sixty_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the machine is doing: time decides no test."""
    monkeypatch.setattr("flysurgery.fidelity.reconstruction.affordable", lambda *_: 60)


def images(count: int, seed: int = 0) -> Tensor:
    """Smooth random images: neighbouring pixels are alike, as in photographs."""
    small = torch.randn(count, 3, 5, 5, generator=torch.Generator().manual_seed(seed))
    return nn.functional.interpolate(small, (32, 32), mode="bicubic")


def timm_model(width: int = 96, heads: int = 2) -> nn.Module:
    return vit(img_size=32, patch_size=16, embed_dim=width, num_heads=heads)


def vit_pytorch_model() -> nn.Module:
    torch.manual_seed(0)
    return ViT(image_size=32, patch_size=16, num_classes=5, dim=96, depth=2, heads=2, dim_head=24, mlp_dim=192).eval()


@cache
def _pair(make: Make) -> tuple[nn.Module, nn.Module, Sequence[Cut]]:
    student, teacher = make(), make()
    cuts = find_cuts(survey(teacher))
    flysurgery.convert(student)
    return student, teacher, cuts


def pair(make: Make = timm_model) -> tuple[nn.Module, nn.Module, Sequence[Cut]]:
    """A converted model, the dense one, and where its blocks end."""
    return copy.deepcopy(_pair(make))


def check_unchanged(model: nn.Module, state: dict[str, Tensor]) -> None:
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("make", [timm_model, vit_pytorch_model])
def test_it_brings_outputs_and_blocks_closer_and_leaves_what_does_not_learn(make: Make) -> None:
    student, teacher, cuts = pair(make)
    frozen = [name for name, each in student.named_parameters() if each.ndim == 2 and "factors" not in name and "head" not in name]
    for name in frozen[-1:]:
        student.get_parameter(name).requires_grad_(False)
    fresh, samples, unseen = copy.deepcopy(student), Samples(images(40)), images(20, seed=7)
    done = reconstruct(student, teacher, samples, cuts, SHORT)
    assert done.after.relative_error < 0.95 * done.before.relative_error and done.after.blocks[0][1] < done.before.blocks[0][1]
    measured = measure_fidelity(student, teacher, samples.held_out(), cuts)
    assert measured.relative_error == pytest.approx(done.after.relative_error, rel=1e-4)
    assert done.kept in [update for update, _ in done.history] and done.updates >= done.kept > 0
    with torch.no_grad():
        before, after = ((each(unseen) - teacher(unseen)).norm() for each in (fresh, student))
    assert after < before
    changed = {name for name, value in student.named_parameters() if not torch.equal(value, fresh.get_parameter(name))}
    embedding = {name for name, _ in student.named_parameters() if name.startswith(("patch_embed", "pos_embed", "cls_token", "to_patch"))}
    assert embedding and not changed & {*embedding, *frozen[-1:]}
    assert {name for name, _ in student.named_parameters() if "factors" in name or "norm" in name} - embedding <= changed


@pytest.mark.parametrize(
    ("inputs", "rate"), [(images(20), 100.0), (torch.full((20, 3, 32, 32), 0.3), SHORT.rate)], ids=["too fast", "of one colour"]
)
def test_it_is_never_worse_than_its_start(inputs: Tensor, rate: float) -> None:
    student, teacher, cuts = pair()
    before = copy.deepcopy(student.state_dict())
    done = reconstruct(student, teacher, Samples(inputs), cuts, replace(SHORT, rate=rate))
    assert done.after.relative_error <= done.before.relative_error and done.after.lowest_cosine >= done.before.lowest_cosine
    if rate == 100.0:
        assert done.kept == 0 and done.after == done.before
        check_unchanged(student, before)


def test_an_interruption_leaves_the_model_as_it_was() -> None:
    student, teacher, cuts = pair()
    before, state = copy.deepcopy(student.state_dict()), torch.get_rng_state()
    with pytest.raises(KeyboardInterrupt):
        reconstruct(student, teacher, Samples(images(20)), cuts, SHORT, progress=Mock(side_effect=KeyboardInterrupt))
    check_unchanged(student, before)
    check_unchanged(teacher, teacher.state_dict())
    assert torch.equal(torch.get_rng_state(), state)


def test_one_seed_gives_one_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flysurgery.fidelity.reconstruction.affordable", lambda *_: 8)
    results = []
    for seed in (3, 3, 4):
        student, teacher, cuts = pair()
        torch.manual_seed(len(results))  # the caller's seed plays no part
        assert reconstruct(student, teacher, Samples(images(20)), cuts, replace(SHORT, seed=seed)).updates == 8
        results.append(torch.cat([parameter.detach().flatten() for parameter in student.parameters()]))
    assert torch.equal(results[0], results[1]) and not torch.equal(results[0], results[2])


def test_a_slow_machine_ends_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flysurgery.fidelity.reconstruction.affordable", lambda *_: 10**9)
    student, teacher, cuts = pair()
    done = reconstruct(student, teacher, Samples(images(20)), cuts, Settings(minutes=0.02, batch=2))
    assert done.updates < 10**6 and done.history[-1][0] == done.updates


def test_what_cannot_be_fitted_is_one_sentence() -> None:
    student, teacher, cuts = pair()
    spoilt, half, frozen = (copy.deepcopy(student) for _ in range(3))
    nn.init.constant_(spoilt.norm.weight, float("nan"))
    for model, where, error, words in (
        (student, (), SurgeryError, "no place where one tensor carries everything on"),
        (half.bfloat16(), cuts, SurgeryError, "too small for weights in torch.bfloat16; convert the model in float32"),
        (spoilt, cuts, DataError, "no finite numbers"),
        (frozen.requires_grad_(False), cuts, SurgeryError, "requires_grad=False"),
    ):
        with pytest.raises(error, match=words):
            reconstruct(model, teacher, Samples(images(20)), where, SHORT)
    for minutes in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(OptionError, match="minutes must be a positive number"):
            Settings(minutes=minutes)


@pytest.mark.gpu
def test_on_cuda_the_model_gives_what_was_measured_and_fused_modules_fit_it_as_its_own_do(monkeypatch: pytest.MonkeyPatch) -> None:
    given, own, samples = pair(lambda: timm_model(384, 6)), reconstruction.fuse, Samples(images(40))
    fused, errors = list[int](), list[float]()
    monkeypatch.setattr(clock, "medians_ms", lambda *_, **__: (2.0, 1.0))  # everything fused is faster
    monkeypatch.setattr(reconstruction, "fuse", lambda *model, **how: fused.append(len(own(*model, **how))))
    for minutes in (0.9 * FUSED_FROM_MINUTES, 60):
        student, teacher, cuts = copy.deepcopy(given)
        student, teacher = student.cuda(), teacher.cuda()
        first = measure_fidelity(student, teacher, samples.held_out(32), cuts)
        done = reconstruct(student, teacher, samples, cuts, replace(SHORT, minutes=minutes, batch=32))
        assert not is_optimized(student) and not is_optimized(teacher)
        errors.append(done.after.relative_error)
        assert done.before == first and done.after.relative_error < 0.95 * first.relative_error
        for device, tolerance in (("cuda", 1e-3), ("cpu", 1e-2)):
            measured = measure_fidelity(student.to(device), teacher.to(device), samples.held_out(), cuts)
            assert measured.relative_error == pytest.approx(errors[-1], rel=tolerance), "nothing that was packed before is used"
    assert len(fused) == 2 and all(fused), "of the teacher and of the student, in the longer run alone"
    assert errors[0] == pytest.approx(errors[1], rel=0.05)


FIT = """
import json, sys, torch
from torch import distributed as dist
from flysurgery.calibration import Samples
from flysurgery.fidelity import Settings, reconstruct, reconstruction
from flysurgery.fidelity.processes import connected
from tests.fidelity.test_reconstruct import images, pair
kind, device = sys.argv[1], torch.device("cpu")
dist.init_process_group("gloo")
rank = dist.get_rank()
with connected(torch.device("cpu")) as processes:
    tensors = [torch.full((2, 3), 1.0 + rank).T, torch.arange(4.0) * (1 + 2 * rank)]
    processes.average(tensors)
    shared = [torch.full((2,), float(rank), requires_grad=True), torch.full((3,), 5.0 + rank, dtype=torch.float64)]
    processes.share(shared)
    seen = [each.tolist() for each in (*tensors, *shared)], processes.agreed({"rank": rank}), processes.count
    try:
        processes.share([torch.zeros(2 + rank)])
        said = None
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
if kind == "cuda":
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
student, teacher, cuts = pair()
with torch.no_grad():
    student.blocks[0].attn.proj.weight.mul_(1 + rank)  # the first process's start is what counts
drawn, draw, affordable = [], reconstruction.Source.draw, reconstruction.affordable
def recorded(source):
    x = draw(source)
    drawn.append(float(x.sum()))
    return x
reconstruction.Source.draw = recorded
reconstruction.affordable = lambda *given: affordable(*given) * 0 + 40
student, teacher = student.to(device), teacher.to(device)
done = reconstruct(student, teacher, Samples(images(40)), cuts, Settings(minutes=60, batch=8))
whole = torch.cat([each.detach().flatten() for each in student.parameters()]).double().cpu()
mine = {"whole": whole.tolist()[::97], "sum": float(whole.abs().sum()), "history": done.history, "updates": done.updates, "drawn": drawn}
both = [None, None]
dist.all_gather_object(both, mine | {"batch": done.batch, "kept": done.kept, "seen": seen, "said": said})
dist.destroy_process_group()
if rank == 0:
    print(json.dumps(both))
"""


def fitted(folder: Path, kind: str) -> list[dict[str, Any]]:
    """What each of the two processes found, which is one result, closer than the start."""
    done = two_processes(folder, FIT, kind)
    assert [each.returncode for each in done] == [0, 0], [each.stderr[-2000:] for each in done]
    first, second = json.loads(done[0].stdout.splitlines()[-1])
    same = ("whole", "sum", "history", "updates", "batch", "kept", "seen", "said")
    assert [first[name] for name in same] == [second[name] for name in same]
    assert first["updates"] == 40 and first["batch"] == 16 and first["kept"] > 0
    errors = dict(first["history"])
    assert errors[first["kept"]] == min(errors.values()) < errors[0]
    return [first, second]


def test_two_processes_have_one_mean_one_start_and_one_model_from_views_of_their_own(tmp_path: Path) -> None:
    first, second = fitted(tmp_path, "cpu")
    assert len(first["drawn"]) == len(second["drawn"]) and first["drawn"] != second["drawn"]
    tensors, agreed, count = first["seen"]
    assert tensors == [[[1.5, 1.5]] * 3, [0.0, 2.0, 4.0, 6.0], [0.0, 0.0], [5.0, 5.0, 5.0]] and agreed == {"rank": 0} and count == 2
    assert first["said"].startswith("SurgeryError: the processes converted the model by different plans, so they cannot fit it together")


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason=f"needs two CUDA devices, and PyTorch finds {torch.cuda.device_count()}")
def test_two_gpus_end_with_one_model(tmp_path: Path) -> None:
    fitted(tmp_path, "cuda")
