"""Several processes, here on the CPU: together they are one with a larger batch, and they may train again."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from torch import nn

from flysurgery.checkpoint import build_base, load, save, save_dense
from flysurgery.finetune import Settings, train, training_data
from flysurgery.inference import convert
from tests.finetune.conftest import BASE
from tests.finetune.test_unlabelled import HEADLESS, photographs
from tests.support.processes import launch

__all__ = ["photographs"]  # a fixture

PROGRAM = """
import json, sys, torch, flysurgery
from flysurgery.finetune import Settings, leave_processes, train, training_data
settings = Settings(**json.loads(sys.argv[2]))
for _ in range(2):
    model = flysurgery.load(sys.argv[1])
    outcome = train(model, training_data("fractals", model, settings), settings)
leave_processes()
assert not torch.distributed.is_initialized()
if outcome.is_main:
    print(json.dumps(outcome.to_json()))
"""


UNLABELLED = """
import json, sys, flysurgery
from flysurgery.checkpoint import load_dense
from flysurgery.finetune import Settings, held_out_data, leave_processes, train, training_data
settings, folder, images = Settings(**json.loads(sys.argv[2])), sys.argv[1], sys.argv[3]
model, teacher = flysurgery.load(folder), load_dense(sys.argv[4])[0]
data, held_out = training_data(images, model, settings, teacher=True), held_out_data(images, model, teacher=True)
resume = sys.argv[6:] == ["resume"]
outcome = train(model, data, settings, teacher=teacher, held_out=held_out, folder=__import__("pathlib").Path(sys.argv[5]), resume=resume)
if outcome.is_main:
    flysurgery.save(outcome.model, folder + f".{resume}")
    print(json.dumps(outcome.to_json()))
leave_processes()
"""


def launched(folder: Path, program: str, *arguments: object) -> dict:
    """What two processes print."""
    done = launch(folder, program, *arguments)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_two_processes_are_one_with_twice_the_batch(converted: Callable[[], nn.Module], tmp_path: Path) -> None:
    settings = Settings(epochs=1, batch_size=8, images_per_epoch=48, log_every=3, cpu=True)
    save(converted(), tmp_path / "model")
    both = launched(tmp_path, PROGRAM, tmp_path / "model", json.dumps(asdict(settings)))
    model = converted()
    larger = Settings(**asdict(settings) | {"batch_size": 16})
    alone = train(model, training_data("fractals", model, larger), larger)
    assert both["processes"] == 2 and both["updates"] == alone.updates == 3 and both["images"] == alone.images == 48
    assert both["loss"] == pytest.approx(alone.loss, rel=1e-4)


def test_two_processes_distil_without_labels_and_agree_on_the_budget_and_the_best_state(photographs: Path, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = build_base(BASE, HEADLESS).eval()
    save_dense(model, tmp_path / "dense", BASE, HEADLESS, force=False)
    convert(model, base=BASE, base_args=HEADLESS)
    save(model, tmp_path / "model")
    settings = json.dumps(asdict(Settings(minutes=0.05, batch_size=8, cpu=True)))
    first, again = (
        launched(tmp_path, UNLABELLED, tmp_path / "model", settings, photographs, tmp_path / "dense", tmp_path / "run", *more)
        for more in ((), ("resume",))
    )
    assert first["processes"] == 2 and first["fidelity_after"]["relative_error"] <= first["fidelity_before"]["relative_error"]
    assert [again[name] for name in ("updates", "kept", "fidelity_after")] == [
        first[name] for name in ("updates", "kept", "fidelity_after")
    ]
    one, other = (load(tmp_path / f"model.{each}") for each in (False, True))
    for mine, theirs in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, theirs)
