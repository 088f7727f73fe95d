"""The list of a model's linear layers."""

from __future__ import annotations

import json
from pathlib import Path

from tests.cli.conftest import TINY, Run


def test_layers_that_are_alike_share_a_row(run: Run, tmp_path: Path) -> None:
    outcome = run("inspect", *TINY)
    assert (outcome.code, outcome.err) == (0, "")
    rows = {line.split()[0]: line.split()[1:] for line in outcome.out.splitlines()[1:] if line}
    qkv, fc2 = rows["blocks.*.attn.qkv"], rows["blocks.*.mlp.fc2"]
    assert qkv[:4] == ["2", "qkv", "192x64", "1"]
    assert qkv[6:] == ["q,k,v", "(1,16,16,4),(4,16,16,1)"]
    assert fc2[:4] == ["2", "ffn_out", "64x256", "1"]
    assert fc2[6:] == ["(1,16,16,4),(4,16,64,1)"]
    assert rows["head"][:2] == ["1", "head"]
    assert "blocks 0 to 1: blocks.0 to blocks.1" in outcome.out
    assert list(tmp_path.iterdir()) == []


def test_shares_and_totals(run: Run) -> None:
    document = json.loads(run("inspect", *TINY, "--json").out)
    rows = {row["fqn"]: row for row in document["targets"]}
    qkv = rows["blocks.0.attn.qkv"]
    tokens = qkv["rows"] // 2
    assert (qkv["params"], qkv["flops"]) == (64 * 192 + 192, 2 * 64 * 192 * tokens)
    assert document["linear_flops"] == sum(row["flops"] for row in rows.values())
    assert document["blocks"] == ["blocks.0", "blocks.1"]
    assert sum(row["params"] for row in rows.values()) < document["params"]
    table = {line.split()[0]: line.split() for line in run("inspect", *TINY).out.splitlines() if line}
    share = 2 * (64 * 192 + 192) / document["params"]
    assert table["blocks.*.attn.qkv"][5] == f"{share:.1%}"


def test_obstacles_are_told_with_their_code(run: Run) -> None:
    assert "head (advice): it is a classifier head" in run("inspect", *TINY).out
    document = json.loads(run("inspect", *TINY, "--json").out)
    head = next(target for target in document["targets"] if target["fqn"] == "head")
    assert [(obstacle["code"], obstacle["blocking"]) for obstacle in head["obstacles"]] == [("head", False)]
    assert head["replaced_by"] is None
