"""Updates that a CUDA graph replays: they are those that are made one launch at a time."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from flysurgery.fidelity.captured import WARM_UP, Captured
from flysurgery.finetune import step
from flysurgery.finetune.run import Outcome
from flysurgery.inference import clock, is_optimized
from tests.finetune.conftest import rows
from tests.finetune.test_run import QUICK, UNLABELLED, check_resumed, taught, train, training_data

Make = Callable[..., nn.Module]

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _accelerate() -> Iterator[None]:
    """accelerate keeps the device and the precision of a process's first run."""
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def test_a_replay_does_what_the_calls_do_and_counts_as_a_write() -> None:
    weights = [torch.ones(3, device="cuda") for _ in range(2)]

    def once(weight: Tensor) -> Callable[[Tensor], Tensor]:
        return lambda x: weight.add_(x.mean()) * torch.rand(3, device="cuda")

    captured, ways = Captured([weights[0]]), [once(each) for each in weights]
    for number in range(WARM_UP + 3):
        x = torch.full((4 if number != WARM_UP + 1 else 2,), float(number), device="cuda")
        found, versions = [], weights[0]._version
        for call in (partial(captured, ways[0]), ways[1]):
            torch.manual_seed(number)
            found.append(call(x))
        assert torch.equal(*found) and torch.equal(*weights)
        assert weights[0]._version > versions, "a replay is a write"


def test_what_reads_from_the_device_runs_as_it_is_and_random_numbers_go_on() -> None:
    calls, other = [], Captured([])
    draws = [other(lambda: torch.rand(3, device="cuda")) for _ in range(WARM_UP + 1)]
    captured = Captured([])
    for _ in range(WARM_UP + 2):
        assert captured(lambda x: calls.append(float(x.sum())) or x * 2, torch.ones(2, device="cuda")).tolist() == [2, 2]
    assert len(calls) == WARM_UP + 2
    draws += [torch.rand(3, device="cuda"), other(lambda: torch.rand(3, device="cuda"))]
    assert len({tuple(each.tolist()) for each in draws}) == len(draws), "a graph of before, and what is no graph, still draw"


@pytest.mark.parametrize("optimizer", [None, "adamw"])
def test_a_run_has_the_losses_of_one_that_is_not_captured(
    photographs: Path, converted: Make, optimizer: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses = []
    for captures in (True, False):
        if not captures:
            monkeypatch.setattr(step, "_can_be_captured", lambda _: False)
        settings = replace(UNLABELLED, cpu=False, precision="no", optimizer=optimizer)
        taught(converted(0), photographs, settings, folder=tmp_path / str(captures))
        losses.append([float(row["loss"]) for row in rows(tmp_path / str(captures)) if row["loss"]])
    assert len(losses[0]) > 10
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


def test_a_stopped_run_on_a_gpu_goes_on_with_the_losses_of_one_that_was_not(converted: Make, dense: nn.Module, tmp_path: Path) -> None:
    settings = replace(QUICK, cpu=False, mixup=0.4, precision="no")
    data = training_data("digits", dense, settings)
    check_resumed(tmp_path, lambda **more: train(converted(), data, settings, teacher=copy.deepcopy(dense), **more), stopped=14, state=12)


def test_a_stopped_run_fuses_the_groups_of_before_when_it_goes_on(
    converted: Make, dense: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, fused = replace(QUICK, cpu=False, precision="bf16"), list[object]()
    data = training_data("digits", dense, settings)
    monkeypatch.setattr("flysurgery.finetune.settings.FUSED_FROM_IMAGES", 1)
    monkeypatch.setattr(step, "fuse", lambda *given, own=step.fuse, **how: fused.append(own(*given, **how)) or fused[-1])

    def go(**more: object) -> Outcome:
        times = (1.0, 2.0) if "resume" in more else (2.0, 1.0)  # a resumed run that measured would fuse nothing
        monkeypatch.setattr(clock, "medians_ms", lambda *_, **__: times)
        return train(converted(), data, settings, teacher=copy.deepcopy(dense), **more)

    check_resumed(tmp_path, go, stopped=14, state=12)
    assert fused[0] and fused[0] == fused[1] == fused[2]


def test_a_long_run_trains_with_fused_modules_and_leaves_none(photographs: Path, converted: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    fused = []
    monkeypatch.setattr("flysurgery.finetune.settings.FUSED_FROM_IMAGES", 1)
    monkeypatch.setattr(step, "fuse", lambda *given, own=step.fuse, **how: fused.append(own(*given, **how)) or fused[-1])
    outcome = taught(converted(0), photographs, replace(UNLABELLED, cpu=False, precision="bf16"))
    (groups,) = fused
    assert groups, "of the model that learns"
    assert not is_optimized(outcome.model)
    assert outcome.fidelity_before is not None and outcome.fidelity_after is not None
    assert outcome.fidelity_after.relative_error < 0.9 * outcome.fidelity_before.relative_error
