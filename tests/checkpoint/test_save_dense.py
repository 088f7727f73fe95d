"""Writing dense models into local folders in timm's layout."""

from __future__ import annotations

from pathlib import Path

import pytest
import timm
import torch
from torch import nn

from flysurgery.checkpoint import load_dense, save_dense
from flysurgery.errors import CheckpointError
from tests.checkpoint.conftest import ARGUMENTS, BASE, outputs, small_model


def test_timm_and_flysurgery_open_it(tmp_path: Path) -> None:
    model = small_model()
    nn.init.normal_(model.head.weight)
    save_dense(model, tmp_path / "dense", BASE, ARGUMENTS, force=False)
    opened, base, base_args = load_dense(tmp_path / "dense")
    assert (base, base_args) == (BASE, ARGUMENTS)
    assert torch.equal(outputs(opened), outputs(model))
    assert torch.equal(outputs(timm.create_model(f"local-dir:{tmp_path / 'dense'}", pretrained=True).eval()), outputs(model))
    modes = {(tmp_path / "dense" / name).stat().st_mode for name in ("model.safetensors", "config.json")}
    assert len(modes) == 1


def test_a_tag_of_published_weights_is_not_kept(tmp_path: Path) -> None:
    save_dense(small_model(), tmp_path / "dense", f"{BASE}.augreg_in21k", ARGUMENTS, force=False)
    assert load_dense(tmp_path / "dense")[1] == BASE


def test_tensors_that_are_used_twice_are_both_there(tmp_path: Path) -> None:
    model = small_model()
    model.blocks[1].mlp.fc1.weight = model.blocks[0].mlp.fc1.weight
    save_dense(model, tmp_path / "dense", BASE, ARGUMENTS, force=False)
    assert torch.equal(outputs(load_dense(tmp_path / "dense")[0]), outputs(model))


def test_force_replaces_a_model_and_no_stranger(tmp_path: Path) -> None:
    folder = tmp_path / "dense"
    first, second = small_model(), small_model()
    nn.init.normal_(second.head.weight)
    save_dense(first, folder, BASE, ARGUMENTS, force=False)
    with pytest.raises(CheckpointError, match="force"):
        save_dense(second, folder, BASE, ARGUMENTS, force=False)
    assert torch.equal(outputs(load_dense(folder)[0]), outputs(first))
    save_dense(second, folder, BASE, ARGUMENTS, force=True)
    assert torch.equal(outputs(load_dense(folder)[0]), outputs(second))
    (folder / "cat.jpg").write_bytes(b"miaow")
    with pytest.raises(CheckpointError, match=r"cat\.jpg"):
        save_dense(first, folder, BASE, ARGUMENTS, force=True)
