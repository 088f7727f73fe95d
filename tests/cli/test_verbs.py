"""Inspect, doctor and densify; and models of vit-pytorch and transformers through every verb."""

from __future__ import annotations

import json
import platform
from importlib.metadata import version
from pathlib import Path

import pytest
import timm
import torch
import transformers

import flysurgery
from flysurgery import surgery
from flysurgery.checkpoint import load
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
    assert table["blocks.*.attn.qkv"] == ["2", "qkv", "192x64", "1", share, of_flops]
    assert table["blocks.*.mlp.fc2"][:3] == ["2", "ffn_out", "64x256"]
    assert found["linear_flops"] == sum(row["flops"] for row in rows.values())
    assert sum(row["params"] for row in rows.values()) < found["params"]
    assert found["blocks"] == ["blocks.0", "blocks.1"] and "blocks 0 to 1: blocks.0 to blocks.1" in outcome.out
    assert "head (advice): it is a classifier head" in outcome.out
    assert [(obstacle["code"], obstacle["blocking"]) for obstacle in head["obstacles"]] == [("head", False)]


def test_doctor_tells_versions_and_every_backend(run: Run, document: Document) -> None:
    found = document("doctor")
    facts = {fact["what"]: fact for fact in found["facts"]}
    assert facts["python"]["here"].startswith(platform.python_version())
    assert (facts["torch"]["here"], facts["timm"]["here"]) == (version("torch"), version("timm"))
    on_cpu = [row for row in found["backends"] if row["device"] == "cpu" and row["dtype"] == "float32"]
    assert {row["backend"] for row in on_cpu} == set(BACKENDS)
    assert [row["runs"] for row in on_cpu].count("chosen") == 1
    assert all(row["reason"] for row in found["backends"] if row["runs"] != "yes")
    assert "einsum" in run("doctor").out


def test_a_cache_folder_s_parent_that_is_a_file_is_an_obstacle(document: Document, monkeypatch, tmp_path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("FLYSURGERY_CACHE", str(tmp_path / "file" / "cache"))
    facts = {fact["what"]: fact for fact in document("doctor")["facts"]}
    assert "not a folder" in facts["kernel cache"]["obstacle"]


SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 256, "image_size": 32, "patch_size": 8}


PROCESSOR = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.25, 0.25, 0.25], "image_processor_type": "ViTImageProcessor"}


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    """A folder as ``save_pretrained`` of a model and of its image processor write it."""
    torch.manual_seed(0)
    folder = tmp_path / "dense"
    transformers.ViTForImageClassification(transformers.ViTConfig(**SIZES, num_labels=10)).save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    return folder


def test_a_folder_of_transformers_is_converted_with_calibration_and_accuracy(theirs: Path, document: Document, tmp_path: Path) -> None:
    options = ("--calibrate", "digits", "--samples", 40, "--evaluate", "digits", "--out", "out")
    report = document("convert", f"transformers:{theirs}", *options)
    assert report["fidelity"]["output_cosine"] > 0.9 and report["accuracy"]["after"]["samples"] == 599
    model = transformers.AutoModelForImageClassification.from_pretrained(tmp_path / "out")
    again = flysurgery.load(tmp_path / "out")
    x = torch.randn(2, 3, 32, 32)
    assert torch.equal(model(x).logits, again(x).logits)
    assert json.loads((tmp_path / "out" / "preprocessor_config.json").read_text()) == PROCESSOR
    assert again.pretrained_cfg == {"mean": [0.5, 0.5, 0.5], "std": [0.25, 0.25, 0.25]}


def test_a_class_with_its_configuration_has_random_weights(document: Document, tmp_path: Path) -> None:
    sizes = ("--model-args", json.dumps(SIZES | {"num_labels": 3}))
    document("convert", "transformers:Dinov2ForImageClassification", *sizes, "--no-pretrained", "--out", "out")
    assert transformers.Dinov2ForImageClassification.from_pretrained(tmp_path / "out").config.num_labels == 3


def test_a_converted_folder_is_compared_trained_and_made_dense(theirs: Path, document: Document, run: Run) -> None:
    assert run("convert", theirs, "--out", "c").code == 0
    assert document("evaluate", "c", "--against", theirs, "--data", "digits", "--samples", 40)["samples"] == 40
    assert run("finetune", "c", "--data", "digits", "--teacher", theirs, "--epochs", 1, "--out", "trained").code == 0
    assert document("evaluate", "trained", "--data", "digits")["samples"] == 599
    assert run("densify", "c", "--out", "again").code == 0
    model, x = transformers.ViTForImageClassification.from_pretrained("again"), torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(model(x).logits, flysurgery.load("c")(x).logits, rtol=1e-4, atol=1e-5)
    assert document("inspect", "again")["blocks"] == ["vit.layers.0", "vit.layers.1"]


def test_what_is_refused_of_transformers(theirs: Path, refused: Refused, tmp_path: Path) -> None:
    refused("convert", "transformers:Nonsense", "--no-pretrained", words=("no model class 'Nonsense'",))
    refused("convert", "transformers:ViTModel", words=("no weights are published", "--no-pretrained"))
    refused("convert", f"transformers:{tmp_path / 'nowhere'}", words=("there is no folder",))
    refused("convert", theirs, "--model-args", "hidden_size=32", words=("has its own model or weights",), code=2)
    config = json.loads((theirs / "config.json").read_text())
    for architecture, weights, words in (("os.system", None, "no model class 'os.system'"), ("ViTModel", b"", "could not be loaded")):
        (theirs / "config.json").write_text(json.dumps(config | {"architectures": [architecture]}))
        if weights is not None:
            (theirs / "model.safetensors").write_bytes(weights)
        refused("convert", theirs, "--out", "out", words=(words,))
