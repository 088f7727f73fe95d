"""Converting as a user does, on a small model: what is printed, what is written, and that it loads again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from flysurgery.checkpoint import load
from flysurgery.inference import convert
from flysurgery.surgery import Plan
from tests.cli.conftest import RANDOM, TINY, TINY_ARGUMENTS, TINY_BASE, VIT_PYTORCH, Document, Refused, Run, snapshot, tiny_model


def test_a_dry_run_prints_the_plan_and_leaves_nothing(run: Run, document: Document, tmp_path: Path) -> None:
    outcome = run("convert", *TINY, "--dry-run")
    assert (outcome.code, outcome.err) == (0, "")
    lines = {line.split()[0]: line.split() for line in outcome.out.splitlines() if line.strip()}
    assert lines["blocks.*.attn.qkv"][:4] == ["blocks.*.attn.qkv", "2", "qkv", "192x64"]
    assert lines["head"][:2] == ["head", "1"]
    plan = Plan.from_json(document("convert", *TINY, "--dry-run")["plan"])
    assert [layer.fqn for layer in plan.replaced] == [f"blocks.{i}.{name}" for i in (0, 1) for name in ("attn.qkv", "mlp.fc1", "mlp.fc2")]
    assert plan.base == TINY_BASE and plan.base_args == TINY_ARGUMENTS
    assert list(tmp_path.iterdir()) == []


def test_the_default_folder_holds_the_model_that_the_library_converts(run: Run, tmp_path: Path) -> None:
    outcome = run("convert", *RANDOM, "--seed", 0)
    assert outcome.code == 0, outcome.err
    folder = tmp_path / "checkpoints" / "vit_tiny_patch16_224.monarch"
    assert outcome.out.splitlines()[-1] == f"saved in {folder.relative_to(tmp_path)}"
    expected = tiny_model()
    convert(expected)
    images = torch.randn(2, 3, 32, 32)
    with torch.inference_mode():
        assert torch.equal(load(folder)(images), expected(images))


def test_json_has_every_layer_with_its_errors(document: Document, tmp_path: Path) -> None:
    found = document("convert", *RANDOM, "--arch", "lowrank", "--rank", 4, "--roles", "ffn", "--out", "o")
    assert found["folder"] == "o" and found["accuracy"] is None
    replaced = [row for row in found["rows"] if row["status"] == "replace"]
    assert [row["role"] for row in replaced] == ["ffn_in", "ffn_out"] * 2
    for row in replaced:
        assert 0 < row["relative_error"] < 1
        assert row["energy_kept"] == pytest.approx(1 - row["relative_error"] ** 2)
        assert row["params_after"] == 4 * (64 + 256) + (256 if row["role"] == "ffn_in" else 64)
    assert {path.name for path in (tmp_path / "o").iterdir()} == {"model.safetensors", "config.json", "report.json", "README.md"}


def test_a_vit_pytorch_model_and_half_precision_storage(run: Run, tmp_path: Path) -> None:
    outcome = run("convert", "vit_pytorch:ViT", "--model-args", json.dumps(VIT_PYTORCH), "--no-pretrained", "--dtype", "bfloat16")
    assert outcome.code == 0, outcome.err
    folder = tmp_path / "checkpoints" / "vit_pytorch.ViT.monarch"
    loaded = load(folder)
    assert {parameter.dtype for parameter in loaded.parameters()} == {torch.bfloat16}
    assert "- Weights stored in: bfloat16\n" in (folder / "README.md").read_text()
    with torch.inference_mode():
        assert loaded(torch.randn(3, 3, 32, 32).bfloat16()).shape == (3, 5)


def test_include_exclude_and_patterns_choose_the_layers(document: Document) -> None:
    chosen = ("--include", r"mlp\.fc", "--exclude", r"blocks\.0", "--exclude", "fc2", "--patterns", "(1,64,16,4),(4,16,16,1)")
    plan = Plan.from_json(document("convert", *TINY, "--dry-run", *chosen)["plan"])
    assert [(layer.fqn, layer.architecture) for layer in plan.replaced] == [("blocks.1.mlp.fc1", "(1,64,16,4),(4,16,16,1)")]


def test_weights_come_from_a_checkpoint_file_and_force_replaces_the_folder(run: Run, tmp_path: Path) -> None:
    dense = tiny_model()
    torch.save(dense.state_dict(), tmp_path / "weights.pt")
    assert run("convert", *TINY, "--checkpoint", "weights.pt", "--out", "a").code == 0
    first = load("a").state_dict()
    assert torch.equal(first["blocks.0.attn.proj.weight"], dense.state_dict()["blocks.0.attn.proj.weight"])
    assert run("convert", *RANDOM, "--seed", 2, "--out", "a", "--force").code == 0
    before = snapshot(tmp_path)
    assert run("convert", "weights.pt", "--base", *TINY, "--out", "a", "--force").code == 0
    after, second = snapshot(tmp_path), load("a").state_dict()
    assert before.keys() == after.keys() and before["a/model.safetensors"] != after["a/model.safetensors"]
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_calibration_says_its_errors_and_the_images_that_it_left_out(run: Run, refused: Refused, images: Path) -> None:
    (images / "03.png").write_text("broken")
    outcome = run("convert", *RANDOM, "--calibrate", images, "--sequential", "--out", "o")
    assert outcome.code == 0
    assert outcome.err == f"flysurgery: 1 images in {images} cannot be read and are left out: 03.png\n"
    assert "output error  plain error" in outcome.out.splitlines()[0]
    assert f"calibrated with 11 samples of {images}, of which 2 were held out" in outcome.out
    report = json.loads(Path("o/report.json").read_text())
    rows = [row["calibration"] for row in report["rows"] if row["status"] == "replace"]
    assert all(0 < row["output_error"] < row["plain_output_error"] for row in rows)
    assert report["calibration"]["sequential"] is True and report["calibration"]["skipped"] == ["03.png"]
    load("o")
    refused("convert", *RANDOM, "--out", "p", "--calibrate", images, "--samples", 13, words=("13 samples are needed, and only 11",))
