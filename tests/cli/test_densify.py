"""From a converted folder back to one that timm opens by itself."""

from __future__ import annotations

import json
from pathlib import Path

import timm
import torch

from flysurgery import surgery
from flysurgery.checkpoint import load
from tests.cli.conftest import VIT_PYTORCH, Document, Refused, Run


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
