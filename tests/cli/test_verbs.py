"""The verbs with few options, and the tables that all of them print."""

from __future__ import annotations

import json
import platform
from importlib.metadata import version
from pathlib import Path

import pytest
import timm
import torch

from flysurgery import surgery
from flysurgery.checkpoint import load
from flysurgery.cli.tables import print_json, print_table
from flysurgery.ops import BACKENDS
from tests.cli.conftest import TINY, VIT_PYTORCH, Document, Refused, Run


def test_timm_opens_the_dense_folder_and_gives_the_same_outputs(run: Run, converted: Path, tmp_path: Path) -> None:
    outcome = run("densify", converted, "--out", "dense")
    assert (outcome.code, outcome.out, outcome.err) == (0, "6 layers made dense, saved in dense\n", "")
    assert {path.name for path in (tmp_path / "dense").iterdir()} == {"model.safetensors", "config.json"}
    expected = load(converted)
    surgery.densify(expected)
    images = torch.randn(2, 3, 32, 32)
    opened = timm.create_model(f"local-dir:{tmp_path / 'dense'}", pretrained=True).eval()
    with torch.inference_mode():
        assert torch.equal(opened(images), expected(images))


def test_a_dense_folder_is_a_model_and_loses_nothing_in_a_second_conversion(
    run: Run, document: Document, refused: Refused, converted: Path
) -> None:
    """Its layers are products of the architecture already, so projecting them again is exact up to rounding."""
    run("densify", converted, "--out", "dense")
    rows = document("convert", "dense", "--out", "again")["rows"]
    errors = [row["relative_error"] for row in rows if row["status"] == "replace"]
    assert len(errors) == 6 and max(errors) < 1e-6
    refused("densify", "dense", "--out", "other", words=("dense",))
    refused("densify", converted, "--out", "dense", words=("dense", "--force"))
    assert document("densify", converted, "--out", "dense", "--force") == {"folder": "dense", "layers": 6}


def test_a_vit_pytorch_model_returns_as_well(run: Run) -> None:
    run("convert", "vit_pytorch:ViT", "--model-args", json.dumps(VIT_PYTORCH), "--no-pretrained", "--out", "c")
    assert run("densify", "c", "--out", "dense").code == 0
    outcome = run("convert", "dense", "--dry-run")
    assert outcome.code == 0 and "transformer.layers.0.0.to_qkv" in outcome.out, outcome.err


def test_inspect_gives_layers_that_are_alike_one_row(run: Run, document: Document, tmp_path: Path) -> None:
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


def test_doctor_tells_versions_and_every_backend(run: Run, document: Document) -> None:
    found = document("doctor")
    facts = {fact["what"]: fact for fact in found["facts"]}
    assert facts["python"]["here"].startswith(platform.python_version())
    assert (facts["torch"]["here"], facts["timm"]["here"]) == (version("torch"), version("timm"))
    on_cpu = [row for row in found["backends"] if row["device"] == "cpu" and row["dtype"] == "float32"]
    assert {row["backend"] for row in on_cpu} == set(BACKENDS)
    assert [row["runs"] for row in on_cpu].count("chosen") == 1
    assert all(row["reason"] for row in found["backends"] if row["runs"] != "yes")
    outcome = run("doctor")
    assert (outcome.code, outcome.err) == (0, "")
    assert "einsum" in outcome.out and "timm" in outcome.out


def test_a_cache_folder_s_parent_that_is_a_file_is_an_obstacle(document: Document, monkeypatch, tmp_path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("FLYSURGERY_CACHE", str(tmp_path / "file" / "cache"))
    facts = {fact["what"]: fact for fact in document("doctor")["facts"]}
    assert "not a folder" in facts["kernel cache"]["obstacle"]


COLUMNS = ("layer", "n", "worst error", "architecture")
ROWS = [("blocks.*.attn.qkv", "12", "0.612", "(1,96,96,4), (4,96,96,1)"), ("blocks.*.mlp.fc1", "2", "0.7", "(1,384,96,4), (4,96,96,1)")]

WIDE = """\
layer               n  worst error  architecture
blocks.*.attn.qkv  12        0.612  (1,96,96,4), (4,96,96,1)
blocks.*.mlp.fc1    2          0.7  (1,384,96,4), (4,96,96,1)
"""

NARROW = """\
layer               n  worst  architecture
                       error
blocks.*.attn.qkv  12  0.612  (1,96,96,4),
                              (4,96,96,1)
blocks.*.mlp.fc1    2    0.7  (1,384,96,4),
                              (4,96,96,1)
"""

NARROWER = """\
blocks.*.attn.qkv
    n: 12; worst error: 0.612;
    architecture: (1,96,96,4),
    (4,96,96,1)
blocks.*.mlp.fc1
    n: 2; worst error: 0.7;
    architecture: (1,384,96,4),
    (4,96,96,1)
"""


@pytest.mark.parametrize(("width", "expected"), [(120, WIDE), (61, WIDE), (43, NARROW), (32, NARROWER)])
def test_tables_keep_to_the_width_and_lose_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, width: int, expected: str
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    print_table(COLUMNS, ROWS, right=("n", "worst error"))
    assert capsys.readouterr().out == expected


@pytest.mark.parametrize(
    "command",
    [
        ("inspect", *TINY),
        ("doctor",),
        ("convert", *TINY, "--no-pretrained", "--dry-run"),
        ("convert", *TINY, "--no-pretrained", "--arch", "auto", "--budget", 0.4, "--calibrate", "digits", "--samples", 12, "--permute"),
        ("bench", "multiply", "--quick", "--width", 16, "--rows", 8, "--rounds", 2),
    ],
    ids=lambda command: " ".join(map(str, command)),
)
def test_without_a_terminal_tables_have_80_columns(run: Run, monkeypatch: pytest.MonkeyPatch, command: tuple[object, ...]) -> None:
    monkeypatch.delenv("COLUMNS")
    outcome = run(*command)
    assert outcome.code == 0, outcome.err
    lines = outcome.out.splitlines()
    tables = [line for line in lines if "   " in line]  # sentences have as many words as they need
    assert tables and max(map(len, tables)) <= 80 and not any("…" in line for line in lines)


def test_json_is_one_document_and_refuses_what_json_has_not(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"a": [1, None]})
    assert json.loads(capsys.readouterr().out) == {"a": [1, None]}
    with pytest.raises(ValueError, match="JSON"):
        print_json({"a": float("nan")})
