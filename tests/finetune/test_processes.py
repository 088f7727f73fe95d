"""Several processes, here on the CPU: together they are one with a larger batch, they agree, and they may train again."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from torch import nn

from flysurgery.checkpoint import load, save, save_dense
from flysurgery.finetune import Settings, train, training_data
from tests.finetune.conftest import BASE, HEADLESS, built, check_same
from tests.support.processes import launch

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
    done = launch(tmp_path, PROGRAM, photographs, json.dumps(asdict(settings)))
    assert done.returncode == 0, done.stderr
    both, first, again = json.loads(done.stdout.splitlines()[-1])
    model, larger = converted(), replace(settings, batch_size=16)
    alone = train(model, training_data("fractals", model, larger), larger)
    assert both["processes"] == 2 and both["updates"] == alone.updates == 3 and both["images"] == alone.images == 48
    assert both["loss"] == pytest.approx(alone.loss, rel=1e-4)
    assert first["processes"] == 2 and first["fidelity_after"]["relative_error"] <= first["fidelity_before"]["relative_error"]
    assert all(again[name] == first[name] for name in ("updates", "kept", "fidelity_after"))
    check_same(load(tmp_path / "model.False"), load(tmp_path / "model.True"))
