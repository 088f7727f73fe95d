"""How often a run with a budget is looked at, and that a folder whose classes are not the model's is named at the start."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image
from torch import nn

from flysurgery.fidelity import moments
from flysurgery.finetune import Settings, held_out_data, train, training_data
from flysurgery.finetune.loop import LOOKS, looks_for
from flysurgery.finetune.measure import Judge, Look
from tests.finetune.test_run import rows


def test_looks_take_a_fifth_of_the_budget_at_most() -> None:
    assert looks_for(600, 0.5) == LOOKS and looks_for(600, 0.0) == LOOKS
    assert looks_for(600, 50) == 2 and looks_for(60, 50) == 1
    assert moments(100, 1) == {100} and max(moments(100, 3)) == 100 and len(moments(100, 3)) == 3


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


def test_classes_that_are_not_the_models_are_named_at_the_start(dense: nn.Module, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for number in range(10):
        (tmp_path / "train" / str(number)).mkdir(parents=True)
        Image.linear_gradient("L").resize((9, 8 + number)).save(tmp_path / "train" / str(number) / "a.png")
    assert training_data(tmp_path, dense, Settings(), teacher=True).labelled and not caplog.text
    (tmp_path / "train" / "10").mkdir()
    assert not training_data(tmp_path, dense, Settings(), teacher=True).labelled
    assert f"{tmp_path} has not one folder of images for each class of the model, so it is used without labels" in caplog.text
