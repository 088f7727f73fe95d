"""Runs, of one process and of several: what they learn and leave, where they stop, and that a stopped one goes on as if it had not."""

import copy
import errno
import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from timm.data import create_transform
from torch import nn

from flysurgery.checkpoint import load, save, save_dense
from flysurgery.errors import DataError, FlysurgeryError, OptionError, TrainingError
from flysurgery.fidelity import Copied
from flysurgery.finetune import Settings, held_out_data, judging_data, run, train, training_data
from flysurgery.finetune.batches import policy_of
from flysurgery.finetune.judge import Judge, Look
from flysurgery.finetune.run import Outcome, accelerator_for
from flysurgery.finetune.state import States
from flysurgery.layers import ButterflyLinear
from flysurgery.surgery import plan_of
from tests.finetune.conftest import HEADLESS, StoppedError, built, check_same, rows, states, stop_at
from tests.support.models import VIT
from tests.support.processes import kills, run_apart, two_processes

Make = Callable[..., nn.Module]

QUICK = Settings(epochs=2, batch_size=128, log_every=1, save_every=4, learning_rate=3e-3, cpu=True, workers=0)
UNLABELLED = Settings(epochs=8, batch_size=16, log_every=1, cpu=True, workers=0)


def taught(model: nn.Module, photographs: Path, settings: Settings, classes: int = 0, **more: Any) -> Outcome:
    """Train a model towards the dense one, on pictures without labels."""
    data, held_out = training_data(photographs, model, settings, teacher=True), held_out_data(photographs, model, teacher=True)
    return train(model, data, settings, teacher=built(num_classes=classes), held_out=held_out, **more)


def check_resumed(folder: Path, go: Callable[..., Outcome], *, stopped: int, state: int, every: int = 4) -> tuple[Outcome, Outcome]:
    """A run that is stopped and taken up again leaves the log and the weights of one that was not."""
    whole = go(folder=folder / "whole")
    with pytest.raises(StoppedError):
        go(folder=folder / "parts", progress=stop_at(stopped))
    assert states(folder / "parts") == [f"state-{state:08}"]
    (folder / "parts" / f".new-{state + every:08}").mkdir()  # as a kill while saving leaves it
    torch.manual_seed(77)
    parts = go(folder=folder / "parts", resume=True)
    assert rows(folder / "parts") == rows(folder / "whole")
    check_same(whole.model, parts.model)
    assert len(states(folder / "parts")) == 1
    return whole, parts


def test_a_stopped_run_goes_on_with_the_losses_of_one_that_was_not(converted: Make, dense: nn.Module, tmp_path: Path) -> None:
    """Stopped in the middle of an epoch, after updates that no state holds; mixup, erasing and a teacher draw and add what they do."""
    settings = replace(QUICK, mixup=0.4, erase=0.3)
    data, held_out = training_data("digits", dense, settings), held_out_data("digits", dense)
    go = lambda **more: train(converted(), data, settings, teacher=dense, held_out=held_out, **more)  # noqa: E731
    first, second = check_resumed(tmp_path, go, stopped=14, state=12)
    assert len(rows(tmp_path / "whole")) == 19
    assert first.after == replace(second.after, seconds=first.after.seconds) and first.before is not None
    again = go(folder=tmp_path / "parts", resume=True)
    assert (again.loss, again.updates) == (first.loss, first.updates), "a finished run taken up again says the same"
    json.dumps(again.to_json(), allow_nan=False)
    check_same(again.model, first.model)


def test_sparse_to_dense_and_on_from_a_state_behind_the_change(converted: Make, tmp_path: Path) -> None:
    settings = replace(QUICK, densify_after=1)
    data = training_data("digits", converted(), settings)
    whole, _ = check_resumed(tmp_path, lambda **more: train(converted(), data, settings, **more), stopped=13, state=12)
    assert plan_of(whole.model) is None and not any(isinstance(each, ButterflyLinear) for each in whole.model.modules())
    losses = [float(row["loss"]) for row in rows(tmp_path / "whole") if row["loss"]]
    assert abs(losses[9] - losses[8]) < 0.3, "the change itself changes no output"


def test_a_stopped_run_with_a_budget_goes_on_as_it_would_have_and_fuses_the_groups_of_before(
    photographs: Path, converted: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if there were a GPU, where two runs may measure other groups as faster."""
    asked, groups, counts = [], [["blocks.0.mlp.fc2", "ffn"]], iter((11, 11))  # a resumed run asks no more

    class Noting(run.Stepper):
        def __init__(self, *given: Any, only: object, **more: Any) -> None:
            super().__init__(*given, only=None, **more)
            asked.append(only)
            self.groups = groups

    monkeypatch.setattr(run, "Stepper", Noting)
    monkeypatch.setattr(run, "affordable", lambda *_: next(counts))
    settings = replace(UNLABELLED, epochs=None, minutes=5.0, save_every=3)  # so long that a slow machine looks as often
    check_resumed(tmp_path, lambda **more: taught(converted(0), photographs, settings, **more), stopped=8, state=6, every=3)
    assert rows(tmp_path / "whole")[-1]["update"] == "11" and asked == [None, None, groups]


def test_it_learns_from_labels_and_tensorboard_gets_the_rows_of_the_log(converted: Make, tmp_path: Path) -> None:
    tensorboard = find_spec("tensorboard") is not None
    model, settings = converted(), replace(QUICK, epochs=4, batch_size=64, warm_up=0.2, tensorboard=tensorboard)
    outcome = train(model, training_data("digits", model, settings), settings, held_out=held_out_data("digits", model), folder=tmp_path)
    assert outcome.before.top1 < 0.3 < 0.5 < outcome.after.top1, "guessing gives 0.1"
    assert outcome.model is model and not model.training and plan_of(model) is not None
    assert outcome.images == outcome.updates * 64 == 4 * 18 * 64
    if tensorboard:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
        for name in ("loss", "learning_rate", "top1"):
            logged = {int(row["update"]): float(row[name]) for row in rows(tmp_path) if row[name]}
            assert {event.step: event.value for event in events.Scalars(name)} == pytest.approx(logged, rel=1e-6), name


@pytest.mark.parametrize("classes", [0, 10])
def test_it_comes_closer_to_the_teacher_without_labels(photographs: Path, classes: int, converted: Make) -> None:
    outcome = taught(converted(classes), photographs, UNLABELLED, classes=classes)
    assert outcome.before is None
    assert outcome.fidelity_after.relative_error < 0.9 * outcome.fidelity_before.relative_error
    assert outcome.settings.optimizer == "muon" and outcome.kept > 0
    written = json.loads(json.dumps(outcome.to_json(), allow_nan=False))
    assert written["fidelity_after"]["samples"] == 4 and written["labelled"] is False


def test_a_run_that_only_gets_worse_gives_the_start_back(photographs: Path, converted: Make) -> None:
    outcome = taught(converted(0), photographs, replace(UNLABELLED, epochs=2, learning_rate=3.0))
    assert outcome.kept == 0 and outcome.fidelity_after == outcome.fidelity_before
    check_same(outcome.model, converted(0))


def test_mixed_precision_leaves_a_plain_model_in_float32(converted: Make) -> None:
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state()  # accelerate keeps one precision a process
    model, exact, settings = converted(), converted(), replace(QUICK, epochs=1)
    data = training_data("digits", model, settings)
    try:
        loss = train(model, data, replace(settings, precision="bf16")).loss
    finally:
        AcceleratorState._reset_state()
    close = train(exact, data, settings).loss
    assert loss == pytest.approx(close, rel=2e-2) and loss != close
    assert vars(model).keys() == vars(exact).keys() and all(each.dtype == torch.float32 for each in model.parameters())
    image, copied = torch.randn(1, 1, 8, 8), copy.deepcopy(model)
    with torch.no_grad():
        expected = model(image)
        next(model.parameters()).zero_()
        assert torch.equal(copied(image), expected), "a copy runs its own weights"


def test_no_finite_loss_stops_and_keeps_the_last_good_state(converted: Make, tmp_path: Path) -> None:
    model, settings = converted(), replace(QUICK, epochs=1)
    data = training_data("digits", model, settings)

    def spoil(done: int, total: int, text: str) -> None:
        if done == 5:
            with torch.no_grad():
                next(model.parameters()).fill_(float("nan"))

    with pytest.raises(TrainingError, match=r"updates 6 to 6.*the last complete state, of update 4, is kept.*lower learning rate"):
        train(model, data, settings, folder=tmp_path, progress=spoil)
    assert states(tmp_path) == ["state-00000004"]
    lower = replace(settings, learning_rate=1e-4)
    assert train(converted(), data, lower, folder=tmp_path, resume=True).loss < 3


def test_a_full_disk_ends_the_run_and_leaves_the_last_state(
    photographs: Path, converted: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save, calls = Copied.save, []

    def full(self: Copied, file: Path) -> None:
        calls.append(file)
        if len(calls) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        save(self, file)

    monkeypatch.setattr(Copied, "save", full)
    with pytest.raises(TrainingError, match=r"of update 4 .* MB are left; the last complete state, of update 2, is kept; .*No space left"):
        taught(converted(0), photographs, replace(UNLABELLED, save_every=2), folder=tmp_path)
    assert states(tmp_path) == ["state-00000002"]


def test_runs_that_cannot_begin_or_go_on(
    converted: Make, dense: nn.Module, photographs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, headless, spoilt = converted(), converted(0), built(num_classes=0)
    digits, pictures = training_data("digits", model, QUICK), training_data(photographs, headless, UNLABELLED, teacher=True)
    nn.init.constant_(spoilt.get_parameter("norm.weight"), float("nan"))
    seen = {"teacher": spoilt, "held_out": judging_data(photographs, headless, teacher=True)}
    one = replace(QUICK, epochs=1)

    def refused(words: str, *given: Any, error: type[FlysurgeryError] = TrainingError, **more: Any) -> None:
        with pytest.raises(error, match=words):
            train(*given, **more)

    refused("no optimizer 'adamwww'", model, digits, replace(QUICK, optimizer="adamwww"), error=OptionError)
    refused("no policy of augmentation 'none-such'", model, digits, replace(QUICK, augment="none-such"), error=OptionError)
    refused("lower the accumulation", model, digits, replace(QUICK, accumulation=10), error=DataError)
    refused("nothing to densify in a dense model", nn.Linear(2, 2), digits, replace(QUICK, densify_after=1), error=OptionError)
    refused("without labels.*give a teacher", headless, pictures, UNLABELLED)
    refused("no finite numbers before the first update", headless, pictures, UNLABELLED, error=DataError, **seen)
    refused("holds no state to resume from", model, digits, one, folder=tmp_path, resume=True)
    with pytest.raises(StoppedError):
        train(converted(), digits, one, folder=tmp_path, progress=stop_at(5))
    refused("the run of another plan", dense, digits, one, folder=tmp_path, resume=True)
    refused("begun with seed 0, not 1", model, digits, replace(one, seed=1), folder=tmp_path, resume=True)
    refused(r"has come to update 4.*--resume", model, digits, one, folder=tmp_path)
    (tmp_path / "state-00000004" / "run.json").write_text(json.dumps({"plan_sha256": ""}))
    refused("damaged", model, digits, one, folder=tmp_path, resume=True)
    monkeypatch.setattr("flysurgery.finetune.settings.find_spec", lambda name: None)
    refused(r"pip install 'flysurgery\[train\]'", model, digits, QUICK)


def test_a_budget_sets_the_number_of_updates_and_slow_looks_leave_it_to_them(
    dense: nn.Module, converted: Make, photographs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcome = taught(converted(0), photographs, replace(UNLABELLED, epochs=None, minutes=0.03))
    assert outcome.updates >= 1 and outcome.seconds < 20
    look, given = Judge.look, []

    def slow(*judged: Any, **more: Any) -> Look:
        time.sleep(0.3)
        return look(*judged, **more)

    monkeypatch.setattr(Judge, "look", slow)
    monkeypatch.setattr(run, "affordable", lambda update, seconds, agreed: given.append(seconds) or 7)
    model, settings = converted(), Settings(minutes=0.03, cpu=True)
    data, held_out = training_data("digits", model, settings, teacher=True), held_out_data("digits", model, teacher=True)
    outcome = train(model, data, settings, teacher=dense, held_out=held_out, folder=tmp_path)
    assert [row["update"] for row in rows(tmp_path) if row["top1"]] == ["0", "7"]
    assert outcome.labelled and outcome.updates == 7
    assert given[0] < 1.8 - 2 * 0.3, "at least two looks are left out of 1.8 seconds"


def test_a_policy_of_increasing_magnitudes_never_posterizes_to_no_bits() -> None:
    image = Image.fromarray(np.random.default_rng(0).integers(0, 255, (8, 8, 3), np.uint8))
    strongest = create_transform(8, is_training=True, auto_augment=policy_of(Settings(augment="rand-m10-inc1")))
    for _ in range(300):
        strongest(image)


PROGRAM = """
import json, sys, torch, flysurgery
from pathlib import Path
from flysurgery.checkpoint import load_dense
from flysurgery.finetune import Settings, held_out_data, leave_processes, train, training_data
folder, images, settings = Path.cwd(), sys.argv[1], Settings(**json.loads(sys.argv[2]))
model = flysurgery.load(folder / "labelled")
outcomes = [train(model, training_data("fractals", model, settings), settings)]
settings = Settings(minutes=0.05, batch_size=8, cpu=True)
for resume in (False, True):
    model, teacher = flysurgery.load(folder / "model"), load_dense(folder / "dense")[0]
    data, held_out = training_data(images, model, settings, teacher=True), held_out_data(images, model, teacher=True)
    outcomes.append(train(model, data, settings, teacher=teacher, held_out=held_out, folder=folder / "run", resume=resume))
    if outcomes[-1].is_main:
        flysurgery.save(outcomes[-1].model, folder / f"model.{resume}")
leave_processes()
assert not torch.distributed.is_initialized()
if outcomes[0].is_main:
    print(json.dumps([each.to_json() for each in outcomes]))
"""


def test_two_processes_and_two_small_batches_are_one_large_batch_and_processes_agree_on_the_budget_and_the_best_state(
    converted: Callable[..., nn.Module], photographs: Path, tmp_path: Path
) -> None:
    settings = Settings(epochs=1, batch_size=8, images_per_epoch=48, log_every=3, cpu=True)
    save(converted(), tmp_path / "labelled")
    save(converted(0), tmp_path / "model")
    save_dense(built(num_classes=0), tmp_path / "dense", VIT, HEADLESS, force=False)
    done = two_processes(tmp_path, PROGRAM, photographs, json.dumps(asdict(settings)))
    assert [each.returncode for each in done] == [0, 0], [each.stderr[-2000:] for each in done]
    both, first, again = json.loads(done[0].stdout.splitlines()[-1])
    assert both["processes"] == 2
    for larger in (replace(settings, batch_size=16), replace(settings, accumulation=2)):  # generated images are numbered
        model = converted()
        alone = train(model, training_data("fractals", model, larger), larger)
        assert both["updates"] == alone.updates == 3 and both["images"] == alone.images == 48
        assert both["loss"] == pytest.approx(alone.loss, rel=1e-4)
    assert first["processes"] == 2 and first["fidelity_after"]["relative_error"] <= first["fidelity_before"]["relative_error"]
    assert all(again[name] == first[name] for name in ("updates", "kept", "fidelity_after"))
    check_same(load(tmp_path / "model.False"), load(tmp_path / "model.True"))


def keep_states(folder: Path) -> None:
    settings = Settings(cpu=True)
    accelerator = accelerator_for(settings, None)
    model = nn.Linear(3, 2)
    best, optimizer = Copied(model), torch.optim.AdamW(model.parameters())
    accelerator.prepare(model, optimizer)
    states, ends = States(folder, model, "data", settings, accelerator), []

    def fill(update: int) -> None:
        with torch.no_grad():
            for tensor in (*model.parameters(), *best._values):
                tensor.fill_(update)

    def save(update: int) -> None:
        fill(update)
        states.save(update, {"seen": update}, best)

    save(1)
    for _ in kills(lambda: save(2)):
        update, notes = states.begin(resume=True)
        fill(0)
        states.load(update, best)
        assert notes == {"seen": update} and update in (1, 2)
        assert all(bool((tensor == update).all()) for tensor in (*model.parameters(), *best._values))
        ends.append(update)
        for update in (3, 1):
            save(update)
            assert [path.name for path in folder.iterdir()] == [f"state-{update:08d}"]
    assert {*ends} == {1, 2}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="Windows has no fork")
def test_killed_at_any_moment(tmp_path: Path) -> None:
    run_apart(keep_states, tmp_path)
