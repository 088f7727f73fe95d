"""Updates that a CUDA graph replays: they are those that are made one launch at a time."""

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
from torch import nn

from flysurgery.finetune import step
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


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_a_stopped_run_on_a_gpu_goes_on_with_the_losses_of_one_that_was_not(
    converted: Make, dense: nn.Module, precision: Literal["no", "bf16"], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With bfloat16 by fused modules, all of which are faster."""
    if precision == "bf16":
        monkeypatch.setattr("flysurgery.finetune.settings.FUSED_FROM_IMAGES", 1)
        monkeypatch.setattr(clock, "medians_ms", lambda *_, **__: (2.0, 1.0))
    settings = replace(QUICK, cpu=False, mixup=0.4, precision=precision)
    data = training_data("digits", dense, settings)
    check_resumed(tmp_path, lambda **more: train(converted(), data, settings, teacher=copy.deepcopy(dense), **more), stopped=14, state=12)


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
