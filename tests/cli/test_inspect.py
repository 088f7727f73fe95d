"""The list of a model's linear layers."""

from __future__ import annotations

import json
from pathlib import Path

from tests.cli.conftest import TINY, Run


def test_layers_that_are_alike_share_a_row(run: Run, tmp_path: Path) -> None:
    outcome = run("inspect", *TINY)
    assert (outcome.code, outcome.err) == (0, "")
    rows = {line.split()[0]: line.split()[1:] for line in outcome.out.splitlines()[1:]}
    assert rows["blocks.*.attn.qkv"] == ["2", "qkv", "192x64", "1", "q,k,v"]
    assert rows["blocks.*.mlp.fc2"] == ["2", "ffn_out", "64x256", "1"]
    assert rows["head"][:2] == ["1", "head"]
    assert list(tmp_path.iterdir()) == []


def test_obstacles_are_told_with_their_code(run: Run) -> None:
    assert "head (advice): it is a classifier head" in run("inspect", *TINY).out
    document = json.loads(run("inspect", *TINY, "--json").out)
    head = next(target for target in document["targets"] if target["fqn"] == "head")
    assert [(obstacle["code"], obstacle["blocking"]) for obstacle in head["obstacles"]] == [("head", False)]
