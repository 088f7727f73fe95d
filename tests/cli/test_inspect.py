"""The list of a model's linear layers."""

from __future__ import annotations

from pathlib import Path

from tests.cli.conftest import TINY, Document, Run


def test_layers_that_are_alike_share_a_row(run: Run, document: Document, tmp_path: Path) -> None:
    outcome = run("inspect", *TINY)
    assert (outcome.code, outcome.err) == (0, "") and list(tmp_path.iterdir()) == []
    table = {line.split()[0]: line.split()[1:] for line in outcome.out.splitlines()[1:] if line}
    found = document("inspect", *TINY)
    rows = {row["fqn"]: row for row in found["targets"]}
    qkv, head = rows["blocks.0.attn.qkv"], rows["head"]
    assert (qkv["params"], qkv["flops"]) == (64 * 192 + 192, 2 * 64 * 192 * qkv["rows"] // 2)
    share = f"{2 * qkv['params'] / found['params']:.1%}"
    of_flops = f"{2 * qkv['flops'] / found['linear_flops']:.1%}"
    assert table["blocks.*.attn.qkv"] == ["2", "qkv", "192x64", "1", share, of_flops, "q,k,v", "(1,16,16,4),(4,16,16,1)"]
    assert table["blocks.*.mlp.fc2"][:3] == ["2", "ffn_out", "64x256"] and table["blocks.*.mlp.fc2"][6:] == ["(1,16,16,4),(4,16,64,1)"]
    assert found["linear_flops"] == sum(row["flops"] for row in rows.values())
    assert sum(row["params"] for row in rows.values()) < found["params"]
    assert found["blocks"] == ["blocks.0", "blocks.1"] and "blocks 0 to 1: blocks.0 to blocks.1" in outcome.out
    assert "head (advice): it is a classifier head" in outcome.out
    assert [(obstacle["code"], obstacle["blocking"]) for obstacle in head["obstacles"]] == [("head", False)]
    assert head["replaced_by"] is None
