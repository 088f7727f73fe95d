"""A state that is being kept while the run is killed: the last or the new one can be resumed from, bit by bit."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch import nn

from flysurgery.fidelity import Copied
from flysurgery.finetune import Settings
from flysurgery.finetune.devices import accelerator_for
from flysurgery.finetune.state import States
from tests.support.kills import kills, run_apart


def keep_states(folder: Path) -> None:
    settings = Settings(cpu=True)
    accelerator = accelerator_for(settings, None)
    model = nn.Linear(3, 2)
    best, optimizer = Copied(model), torch.optim.AdamW(model.parameters())
    accelerator.prepare(model, optimizer)
    states, ends = States(folder, model, "data", settings, 1), []

    def fill(update: int) -> None:
        with torch.no_grad():
            for tensor in (*model.parameters(), *best._values):
                tensor.fill_(update)

    def save(update: int) -> None:
        fill(update)
        states.save(accelerator, update, {"seen": update}, best)

    save(1)
    for _ in kills(lambda: save(2)):
        update, notes = states.check_same()
        fill(0)
        states.load(accelerator, update, best)
        assert notes == {"seen": update} and update in (1, 2)
        assert all(bool((tensor == update).all()) for tensor in (*model.parameters(), *best._values))
        ends.append(update)
        for update in (3, 1):
            save(update)
            assert [path.name for path in folder.iterdir()] == [f"state-{update:08d}"]
    assert {*ends} == {1, 2}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="Windows has no fork")
def test_killed_at_any_moment(tmp_path: Path) -> None:
    run_apart(__name__, keep_states.__name__, tmp_path)
