"""Models of transformers on the command line: folders, classes and hub names as MODEL, and each verb on what comes out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from torch.utils import _pytree as pytree

import flysurgery
from tests.cli.conftest import Document, Refused, Run

SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 256, "image_size": 32, "patch_size": 8}
PROCESSOR = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.25, 0.25, 0.25], "image_processor_type": "ViTImageProcessor"}


@pytest.fixture
def dense(tmp_path: Path) -> Path:
    """A folder as ``save_pretrained`` of a model and of its image processor write it."""
    torch.manual_seed(0)
    folder = tmp_path / "dense"
    transformers.ViTForImageClassification(transformers.ViTConfig(**SIZES, num_labels=10)).save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    return folder


@pytest.fixture
def converted(dense: Path, run: Run, tmp_path: Path) -> Path:
    assert run("convert", dense, "--out", tmp_path / "converted").code == 0
    return tmp_path / "converted"


@pytest.mark.parametrize("prefix", ["", "transformers:"])
def test_a_folder_is_converted_with_calibration_and_accuracy(prefix: str, dense: Path, document: Document, tmp_path: Path) -> None:
    options = ("--calibrate", "digits", "--samples", 40, "--evaluate", "digits", "--out", "out")
    report = document("convert", f"{prefix}{dense}", *options)
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


def test_a_converted_folder_is_compared_trained_and_made_dense(converted: Path, dense: Path, document: Document, run: Run) -> None:
    assert document("evaluate", converted, "--against", dense, "--data", "digits", "--samples", 40)["samples"] == 40
    assert run("finetune", converted, "--data", "digits", "--teacher", dense, "--epochs", 1, "--out", "trained").code == 0
    assert document("evaluate", "trained", "--data", "digits")["samples"] == 599
    assert run("densify", converted, "--out", "again").code == 0
    model = transformers.ViTForImageClassification.from_pretrained("again")
    x = torch.randn(2, 3, 32, 32)
    outputs = [pytree.tree_leaves(each(x).logits)[0] for each in (model, flysurgery.load(converted))]
    torch.testing.assert_close(*outputs, rtol=1e-4, atol=1e-5)
    assert document("inspect", "again")["blocks"] == ["vit.layers.0", "vit.layers.1"]


def test_bad_input_is_one_sentence(dense: Path, converted: Path, refused: Refused, tmp_path: Path) -> None:
    refused("convert", "transformers:Nonsense", "--no-pretrained", words=("no model class 'Nonsense'",))
    refused("convert", "transformers:ViTModel", words=("no weights are published", "--no-pretrained"))
    refused("convert", f"transformers:{tmp_path / 'nowhere'}", words=("there is no folder",))
    refused("convert", converted, words=("is converted already",))
    refused("convert", dense, "--model-args", "hidden_size=32", words=("has its own model or weights",), code=2)
    config = dense / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"architectures": ["os.system"]}))
    refused("convert", dense, "--out", "out", words=("no model class 'os.system'",))
    (dense / "model.safetensors").write_bytes(b"")
    config.write_text(json.dumps(json.loads(config.read_text()) | {"architectures": ["ViTModel"]}))
    refused("convert", dense, "--out", "out", words=("could not be loaded",))
