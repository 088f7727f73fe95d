"""Runs: what they learn, what they leave, that a stopped one goes on as if nothing had been, and where they stop."""

from __future__ import annotations

import copy
import csv
import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from flysurgery.errors import DataError, OptionError, TrainingError
from flysurgery.fidelity import moments
from flysurgery.finetune import Settings, held_out_data, train, training_data
from flysurgery.finetune.loop import LOOKS, looks_for
from flysurgery.finetune.measure import Judge, Look
from flysurgery.layers import ButterflyLinear
from flysurgery.surgery import plan_of

Make = Callable[[], nn.Module]

QUICK = Settings(epochs=2, batch_size=128, log_every=1, save_every=4, learning_rate=3e-3, cpu=True, workers=0)


class StoppedError(Exception):
    """Stands for a kill."""


def rows(folder: Path) -> list[dict[str, str]]:
    """The log without what depends on the clock."""
    with (folder / "log.csv").open() as file:
        return [{name: value for name, value in row.items() if name != "images_per_second"} for row in csv.DictReader(file)]


def states(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.is_dir())


def stop_at(update: int) -> Callable[[int, int, str], None]:
    def progress(done: int, total: int, text: str) -> None:
        if done == update:
            raise StoppedError

    return progress


def test_a_stopped_run_goes_on_with_the_losses_of_one_that_was_not(converted: Make, dense: nn.Module, tmp_path: Path) -> None:
    """Stopped in the middle of an epoch, after updates that no state holds; dropout, mixup and a teacher draw and add what they do."""
    settings = replace(QUICK, mixup=0.4, erase=0.3)
    whole, parts = converted(), converted()
    data = training_data("digits", whole, settings)
    held_out = held_out_data("digits", whole)
    first = train(whole, data, settings, teacher=dense, held_out=held_out, folder=tmp_path / "whole")
    with pytest.raises(StoppedError):
        train(parts, data, settings, teacher=dense, held_out=held_out, folder=tmp_path / "parts", progress=stop_at(14))
    assert states(tmp_path / "parts") == ["state-00000012"]
    (tmp_path / "parts" / ".new-00000016").mkdir()  # as a kill while saving leaves it
    torch.manual_seed(77)
    second = train(converted(), data, settings, teacher=dense, held_out=held_out, folder=tmp_path / "parts", resume=True)
    assert rows(tmp_path / "parts") == rows(tmp_path / "whole") and len(rows(tmp_path / "whole")) == 19
    assert first.after == replace(second.after, seconds=first.after.seconds) and first.before is not None  # pyright: ignore
    for (name, one), other in zip(first.model.state_dict().items(), second.model.state_dict().values(), strict=True):
        assert torch.equal(one, other), name
    assert states(tmp_path / "parts") == ["state-00000018"]


def test_it_learns(converted: Make) -> None:
    model = converted()
    settings = replace(QUICK, epochs=4, batch_size=64, warm_up=0.2)
    outcome = train(model, training_data("digits", model, settings), settings, held_out=held_out_data("digits", model))
    assert outcome.before is not None and outcome.after is not None
    assert outcome.before.top1 < 0.3 < 0.5 < outcome.after.top1, "guessing gives 0.1"
    assert outcome.model is model and not model.training and plan_of(model) is not None
    assert outcome.images == outcome.updates * 64 == 4 * 18 * 64


def test_mixed_precision_leaves_a_plain_model_in_float32(converted: Make) -> None:
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state()  # accelerate keeps one precision a process
    model = converted()
    settings = replace(QUICK, epochs=1, precision="bf16")
    try:
        loss = train(model, training_data("digits", model, settings), settings).loss
    finally:
        AcceleratorState._reset_state()
    exact = converted()
    close = train(exact, training_data("digits", exact, QUICK), replace(QUICK, epochs=1)).loss
    assert loss == pytest.approx(close, rel=2e-2) and loss != close
    assert vars(model).keys() == vars(exact).keys() and all(each.dtype == torch.float32 for each in model.parameters())
    image, copied = torch.randn(1, 1, 8, 8), copy.deepcopy(model)
    with torch.no_grad():
        expected = model(image)
        next(model.parameters()).zero_()
        assert torch.equal(copied(image), expected), "a copy runs its own weights"


def test_two_small_batches_are_one_large_one(converted: Make) -> None:
    """Generated images are numbered, so that an update of two batches sees those of one twice as large."""
    losses = []
    for batch, accumulation in ((16, 1), (8, 2)):
        model = converted()
        settings = replace(QUICK, batch_size=batch, accumulation=accumulation, epochs=1, images_per_epoch=48, log_every=3)
        losses.append(train(model, training_data("fractals", model, settings), settings).loss)
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_a_finished_run_taken_up_again_says_the_same(converted: Make, tmp_path: Path) -> None:
    model = converted()
    settings = replace(QUICK, epochs=1, save_every=None)
    data = training_data("digits", model, settings)
    first = train(model, data, settings, folder=tmp_path)
    again = train(converted(), data, settings, folder=tmp_path, resume=True)
    assert again.loss == first.loss and again.updates == first.updates
    json.dumps(again.to_json(), allow_nan=False)
    for one, other in zip(first.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_tensorboard_gets_the_rows_of_the_log(converted: Make, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    model = converted()
    settings = replace(QUICK, epochs=1, tensorboard=True)
    train(model, training_data("digits", model, settings), settings, held_out=held_out_data("digits", model), folder=tmp_path)
    (file,) = (tmp_path / "tensorboard").glob("events.out.tfevents.*")
    events = EventAccumulator(str(file)).Reload()
    for name in ("loss", "learning_rate", "top1"):
        logged = [(int(row["update"]), float(row[name])) for row in rows(tmp_path) if row[name]]
        seen = [(event.step, event.value) for event in events.Scalars(name)]
        assert [step for step, _ in seen] == [step for step, _ in logged], name
        assert [value for _, value in seen] == pytest.approx([value for _, value in logged], rel=1e-6)


def test_sparse_to_dense_and_on_from_a_state_behind_the_change(converted: Make, tmp_path: Path) -> None:
    settings = replace(QUICK, densify_after=1, save_every=12)
    whole, parts = converted(), converted()
    data = training_data("digits", whole, settings)
    outcome = train(whole, data, settings, folder=tmp_path / "whole")
    assert plan_of(outcome.model) is None and not any(isinstance(each, ButterflyLinear) for each in outcome.model.modules())
    losses = [float(row["loss"]) for row in rows(tmp_path / "whole") if row["loss"]]
    assert abs(losses[9] - losses[8]) < 0.3, "the change itself changes no output"
    with pytest.raises(StoppedError):
        train(parts, data, settings, folder=tmp_path / "parts", progress=stop_at(13))
    train(converted(), data, settings, folder=tmp_path / "parts", resume=True)
    assert rows(tmp_path / "parts") == rows(tmp_path / "whole")


def test_no_finite_loss_stops_and_keeps_the_last_good_state(converted: Make, tmp_path: Path) -> None:
    model = converted()
    settings = replace(QUICK, epochs=1)
    data = training_data("digits", model, settings)

    def spoil(done: int, total: int, text: str) -> None:
        if done == 5:
            with torch.no_grad():
                next(model.parameters()).fill_(float("nan"))

    with pytest.raises(TrainingError, match=r"updates 6 to 6.*the last good state, of update 4, is kept.*lower learning rate"):
        train(model, data, settings, folder=tmp_path, progress=spoil)
    assert states(tmp_path) == ["state-00000004"]
    lower = replace(settings, learning_rate=1e-4)
    assert train(converted(), data, lower, folder=tmp_path, resume=True).loss < 3


def test_another_plan_other_settings_and_a_run_that_is_there_are_refused(converted: Make, dense: nn.Module, tmp_path: Path) -> None:
    settings = replace(QUICK, epochs=1)
    data = training_data("digits", dense, settings)

    def refused(words: str, *, model: nn.Module | None = None, resume: bool = True, **changes: Any) -> None:
        with pytest.raises(TrainingError, match=words):
            train(model or converted(), data, replace(settings, **changes), folder=tmp_path, resume=resume)

    refused("holds no state to resume from")
    with pytest.raises(StoppedError):
        train(converted(), data, settings, folder=tmp_path, progress=stop_at(5))
    refused("the run of another plan", model=dense)
    refused("begun with seed 0, not 1", seed=1)
    refused(r"has come to update 4.*--resume", resume=False)
    (tmp_path / "state-00000004" / "run.json").write_text(json.dumps({"plan_sha256": ""}))
    refused("damaged")


def test_runs_that_cannot_begin(converted: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    model = converted()
    data = training_data("digits", model, QUICK)
    with pytest.raises(OptionError, match="no optimizer 'adamwww'"):
        train(model, data, replace(QUICK, optimizer="adamwww"))
    with pytest.raises(DataError, match="lower the accumulation"):
        train(model, data, replace(QUICK, accumulation=10))
    with pytest.raises(OptionError, match="nothing to densify in a dense model"):
        train(nn.Linear(2, 2), data, replace(QUICK, densify_after=1))
    monkeypatch.setattr("flysurgery.finetune.devices.find_spec", lambda name: None)
    with pytest.raises(TrainingError, match=r"pip install 'flysurgery\[train\]'"):
        train(model, data, QUICK)


def test_looks_take_a_fifth_of_the_budget_at_most() -> None:
    assert looks_for(600, 0.5) == LOOKS and looks_for(600, 0.0) == LOOKS
    assert looks_for(600, 50) == 2 and looks_for(60, 50) == 1
    assert moments(1, 10) == {1} and moments(100, 1) == {100} and max(moments(100, 3)) == 100 and len(moments(100, 10)) == 10


def test_slow_looks_leave_the_budget_to_the_updates(
    dense: nn.Module, converted: Callable[[], nn.Module], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    look = Judge.look

    def slow(self: Judge, model: nn.Module, bare: nn.Module, *, accuracy: bool = True) -> Look:
        time.sleep(0.6)
        return look(self, model, bare, accuracy=accuracy)

    given: list[float] = []

    def seven(stepper: object, batches: object, seconds: float, agreed: object) -> int:
        given.append(seconds)
        return 7

    monkeypatch.setattr(Judge, "look", slow)
    monkeypatch.setattr("flysurgery.finetune.loop.affordable", seven)
    model, settings = converted(), Settings(minutes=0.06, cpu=True)
    data, held_out = training_data("digits", model, settings, teacher=True), held_out_data("digits", model, teacher=True)
    outcome = train(model, data, settings, teacher=dense, held_out=held_out, folder=tmp_path)
    assert [row["update"] for row in rows(tmp_path) if row["top1"]] == ["0", "7"]
    assert outcome.labelled and outcome.updates == 7
    (seconds,) = given  # at least two looks are left out of 3.6 seconds
    assert seconds < 3.6 - 2 * 0.6
