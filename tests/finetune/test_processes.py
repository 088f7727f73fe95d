"""Several processes, and runs that are killed: together they are one with a larger batch, and the last or the new state is whole."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from torch import nn

from flysurgery.checkpoint import load, save, save_dense
from flysurgery.fidelity import Copied
from flysurgery.finetune import Settings, train, training_data
from flysurgery.finetune.devices import accelerator_for
from flysurgery.finetune.state import States
from tests.finetune.conftest import BASE, HEADLESS, built, check_same
from tests.support.processes import kills, run_apart, two_processes

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


def test_two_processes_are_one_with_twice_the_batch_and_agree_on_the_budget_and_the_best_state(
    converted: Callable[..., nn.Module], photographs: Path, tmp_path: Path
) -> None:
    settings = Settings(epochs=1, batch_size=8, images_per_epoch=48, log_every=3, cpu=True)
    save(converted(), tmp_path / "labelled")
    save(converted(0), tmp_path / "model")
    save_dense(built(num_classes=0), tmp_path / "dense", BASE, HEADLESS, force=False)
    done = two_processes(tmp_path, PROGRAM, photographs, json.dumps(asdict(settings)))
    assert [each.returncode for each in done] == [0, 0], [each.stderr[-2000:] for each in done]
    both, first, again = json.loads(done[0].stdout.splitlines()[-1])
    model, larger = converted(), replace(settings, batch_size=16)
    alone = train(model, training_data("fractals", model, larger), larger)
    assert both["processes"] == 2 and both["updates"] == alone.updates == 3 and both["images"] == alone.images == 48
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
        update, notes = states.check_same()
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
