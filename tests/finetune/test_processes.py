"""Several processes, here on the CPU: together they are one with a larger batch, and they may train again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest
from torch import nn

from flysurgery.checkpoint import save
from flysurgery.finetune import Settings, train, training_data

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


def test_two_processes_are_one_with_twice_the_batch(converted: Callable[[], nn.Module], tmp_path: Path) -> None:
    settings = Settings(epochs=1, batch_size=8, images_per_epoch=48, log_every=3, cpu=True)
    save(converted(), tmp_path / "model")
    (tmp_path / "program.py").write_text(PROGRAM)
    root = str(Path(__file__).parents[2])
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")]), "OMP_NUM_THREADS": "1"}
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launch, str(tmp_path / "program.py"), str(tmp_path / "model"), json.dumps(asdict(settings))]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    both = json.loads(done.stdout.splitlines()[-1])
    model = converted()
    larger = Settings(**asdict(settings) | {"batch_size": 16})
    alone = train(model, training_data("fractals", model, larger), larger)
    assert both["processes"] == 2 and both["updates"] == alone.updates == 3 and both["images"] == alone.images == 48
    assert both["loss"] == pytest.approx(alone.loss, rel=1e-4)
