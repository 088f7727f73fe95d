"""Weights from files: all of them fit, or none is loaded."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from flysurgery.checkpoint import load_weights
from flysurgery.errors import CheckpointError, ModelError


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))


@pytest.fixture
def weights() -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {name: torch.randn(t.shape) if t.is_floating_point() else t + 7 for name, t in small().state_dict().items()}


def same(model: nn.Module, weights: dict[str, Tensor]) -> bool:
    return all(torch.equal(tensor, weights[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("suffix", [".safetensors", ".pt", ".pth", ".bin", ""])
def test_formats(suffix: str, weights: dict[str, Tensor], tmp_path: Path) -> None:
    file = tmp_path / f"weights{suffix}"
    save_file(weights, file) if suffix == ".safetensors" else torch.save(weights, file)
    model = small()
    load_weights(model, file)
    assert same(model, weights)


@pytest.mark.parametrize("wrap", ["state_dict", "model"])
def test_training_checkpoints(wrap: str, weights: dict[str, Tensor], tmp_path: Path) -> None:
    prefixed = {f"module.{name}": tensor for name, tensor in weights.items()}
    torch.save({wrap: prefixed, "epoch": 3, "args": argparse.Namespace(lr=0.1)}, tmp_path / "last.pth.tar")
    model = small()
    load_weights(model, tmp_path / "last.pth.tar")
    assert same(model, weights)


def test_values_are_cast_to_the_model(weights: dict[str, Tensor], tmp_path: Path) -> None:
    save_file({name: t.half() if t.is_floating_point() else t for name, t in weights.items()}, tmp_path / "w.safetensors")
    model = small()
    load_weights(model, tmp_path / "w.safetensors")
    assert same(model, {name: t.half().float() if t.is_floating_point() else t for name, t in weights.items()})


@pytest.mark.parametrize(
    ("changes", "fact"),
    [
        ({"0.weight": None}, "1 missing: 0.weight"),
        ({"0.weight": None, "0.bias": None, "1.weight": None, "1.bias": None}, "4 missing: 0.weight, 0.bias, 1.weight, ..."),
        ({"2.weight": torch.zeros(1)}, "1 unknown: 2.weight"),
        ({"0.weight": torch.zeros(4, 5)}, r"1 of another shape: 0.weight is \[4, 5\] instead of \[4, 3\]"),
        ({"0.bias": torch.zeros(1)}, r"0.bias is \[1\] instead of \[4\]"),
        ({"0.bias": torch.zeros(()), "x": torch.zeros(1)}, "1 unknown: x; 1 of another shape"),
    ],
)
@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_what_does_not_fit(changes: dict[str, Tensor | None], fact: str, suffix: str, weights: dict[str, Tensor], tmp_path: Path) -> None:
    found = {name: tensor for name, tensor in {**weights, **changes}.items() if tensor is not None}
    file = tmp_path / f"w{suffix}"
    save_file(found, file) if suffix == ".safetensors" else torch.save(found, file)
    model = small()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(ModelError, match=fact) as caught:
        load_weights(model, file)
    assert "Sequential" in str(caught.value) and "\n" not in str(caught.value)
    assert same(model, before), "nothing may be loaded if anything does not fit"


class Stranger:
    pass


@pytest.mark.parametrize(
    ("content", "fact"),
    [
        (Stranger(), "Python objects are never unpickled"),
        ({"model": Stranger()}, "Python objects are never unpickled"),
        ([1, 2], "no state_dict"),
        ({}, "no state_dict"),
        ({"state_dict": {"0.weight": 3}}, "no state_dict"),
        (torch.zeros(3), "no state_dict"),
    ],
)
def test_torch_files_that_hold_something_else(content: Any, fact: str, tmp_path: Path) -> None:
    torch.save(content, tmp_path / "w.pt")
    with pytest.raises(CheckpointError, match=fact) as caught:
        load_weights(small(), tmp_path / "w.pt")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "content"), [("w.pt", b"not a torch file"), ("w.pt", b""), ("w.safetensors", b"short"), ("w.npz", b"PK\x03\x04")]
)
def test_damaged_files(name: str, content: bytes, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=name) as caught:
        load_weights(small(), tmp_path / name)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["nowhere.pt", "nowhere.safetensors"])
def test_missing_files(name: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=f"there is no .*{name}"):
        load_weights(small(), tmp_path / name)


def test_folder_in_place_of_a_file(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_weights(small(), tmp_path)


def test_weights_of_a_converted_model(saved: Path) -> None:
    with pytest.raises(ModelError, match="holds a converted model"):
        load_weights(small(), saved / "model.safetensors")
