"""Converting as a user does, on a small model: what is printed, what is written, and that it loads again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from flysurgery.checkpoint import build_base, load
from flysurgery.surgery import Plan, convert
from tests.cli.conftest import TINY, TINY_ARGUMENTS, TINY_BASE, Run, snapshot


def test_a_dry_run_prints_the_plan_and_leaves_nothing(run: Run, tmp_path: Path) -> None:
    outcome = run("convert", *TINY, "--dry-run")
    assert outcome.code == 0
    lines = {line.split()[0]: line.split() for line in outcome.out.splitlines() if line.strip()}
    assert lines["blocks.*.attn.qkv"][:4] == ["blocks.*.attn.qkv", "2", "qkv", "192x64"]
    assert lines["blocks.*.mlp.fc1"][:4] == ["blocks.*.mlp.fc1", "2", "ffn_in", "256x64"]
    assert lines["head"][:2] == ["head", "1"]
    assert outcome.err == ""
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_as_json_is_the_plan_and_nothing_else(run: Run) -> None:
    outcome = run("convert", *TINY, "--dry-run", "--json")
    plan = Plan.from_json(json.loads(outcome.out)["plan"])
    assert [layer.fqn for layer in plan.replaced] == [f"blocks.{i}.{name}" for i in (0, 1) for name in ("attn.qkv", "mlp.fc1", "mlp.fc2")]
    assert plan.base == TINY_BASE and plan.base_args == TINY_ARGUMENTS


def test_the_default_folder_holds_the_model_that_the_library_converts(run: Run, tmp_path: Path) -> None:
    outcome = run("convert", *TINY, "--no-pretrained", "--seed", 3)
    assert outcome.code == 0, outcome.err
    folder = tmp_path / "checkpoints" / "vit_tiny_patch16_224.monarch"
    assert outcome.out.splitlines()[-1] == f"saved in {folder.relative_to(tmp_path)}"
    torch.manual_seed(3)
    expected = build_base(TINY_BASE, TINY_ARGUMENTS).eval()
    convert(expected)
    images = torch.randn(2, 3, 32, 32)
    loaded = load(folder)
    with torch.inference_mode():
        assert torch.equal(loaded(images), expected(images))


def test_json_has_every_layer_with_its_errors(run: Run, tmp_path: Path) -> None:
    outcome = run("convert", *TINY, "--no-pretrained", "--arch", "lowrank", "--rank", 4, "--roles", "ffn", "--out", "o", "--json")
    document = json.loads(outcome.out)
    assert document["folder"] == "o" and document["accuracy"] is None
    replaced = [row for row in document["rows"] if row["status"] == "replace"]
    assert {row["role"] for row in replaced} == {"ffn_in", "ffn_out"} and len(replaced) == 4
    for row in replaced:
        assert 0 < row["relative_error"] < 1
        assert row["energy_kept"] == pytest.approx(1 - row["relative_error"] ** 2)
        assert row["params_after"] == 4 * (64 + 256) + (256 if row["role"] == "ffn_in" else 64)
    assert {path.name for path in (tmp_path / "o").iterdir()} == {"model.safetensors", "config.json", "report.json", "README.md"}


def test_a_vit_pytorch_model(run: Run, tmp_path: Path) -> None:
    arguments = {"image_size": 32, "patch_size": 8, "num_classes": 5, "dim": 64, "depth": 2, "heads": 2, "mlp_dim": 128, "dim_head": 32}
    outcome = run("convert", "vit_pytorch:ViT", "--model-args", json.dumps(arguments), "--no-pretrained")
    assert outcome.code == 0, outcome.err
    loaded = load(tmp_path / "checkpoints" / "vit_pytorch.ViT.monarch")
    with torch.inference_mode():
        assert loaded(torch.randn(3, 3, 32, 32)).shape == (3, 5)


def test_half_precision_storage(run: Run) -> None:
    assert run("convert", *TINY, "--no-pretrained", "--out", "half", "--dtype", "bfloat16").code == 0
    assert {parameter.dtype for parameter in load("half").parameters()} == {torch.bfloat16}
    assert "- Weights stored in: bfloat16\n" in Path("half/README.md").read_text()


def test_include_exclude_and_patterns_choose_the_layers(run: Run) -> None:
    outcome = run(
        "convert",
        *TINY,
        "--dry-run",
        "--json",
        *("--include", r"mlp\.fc", "--exclude", r"blocks\.0", "--exclude", "fc2"),
        *("--patterns", "(1,64,16,4),(4,16,16,1)"),
    )
    plan = Plan.from_json(json.loads(outcome.out)["plan"])
    assert [(layer.fqn, layer.architecture) for layer in plan.replaced] == [("blocks.1.mlp.fc1", "(1,64,16,4),(4,16,16,1)")]


def test_weights_come_from_a_checkpoint_file(run: Run, tmp_path: Path) -> None:
    torch.manual_seed(11)
    dense = build_base(TINY_BASE, TINY_ARGUMENTS).eval()
    torch.save(dense.state_dict(), tmp_path / "weights.pt")
    assert run("convert", *TINY, "--checkpoint", "weights.pt", "--out", "a").code == 0
    assert run("convert", "weights.pt", "--base", *TINY, "--out", "b").code == 0
    first, second = load("a").state_dict(), load("b").state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert torch.equal(first["blocks.0.attn.proj.weight"], dense.state_dict()["blocks.0.attn.proj.weight"])


def test_force_replaces_the_folder(run: Run, tmp_path: Path) -> None:
    run("convert", *TINY, "--no-pretrained", "--out", "o", "--seed", 1)
    first = snapshot(tmp_path)
    assert run("convert", *TINY, "--no-pretrained", "--out", "o", "--seed", 2, "--force").code == 0
    second = snapshot(tmp_path)
    assert first.keys() == second.keys()
    assert first["o/model.safetensors"] != second["o/model.safetensors"]
