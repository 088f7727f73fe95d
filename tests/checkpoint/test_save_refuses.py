"""Models that could not be loaded again, and folders that may not be written: refused before anything is written."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

from flysurgery.checkpoint import save
from flysurgery.errors import CheckpointError, OptionError
from flysurgery.surgery import Report
from tests.checkpoint.conftest import ARGUMENTS, BASE, install_random, small_model


def refused(model: nn.Module, folder: Path, **options: object) -> str:
    """The one sentence with which saving is refused; it leaves nothing behind."""
    before = sorted(folder.parent.iterdir())
    with pytest.raises(CheckpointError) as caught:
        save(model, folder, **options)
    assert sorted(folder.parent.iterdir()) == before
    message = str(caught.value)
    assert "\n" not in message and len(message) < 800, message
    return message


def test_dense_model(tmp_path: Path) -> None:
    assert "not converted" in refused(small_model(), tmp_path / "model")


def test_model_without_a_base(tmp_path: Path) -> None:
    dense = small_model()
    dense.pretrained_cfg = {}
    message = refused(install_random(dense), tmp_path / "model")
    assert "base=" in message and "base_args=" in message


@pytest.mark.parametrize(
    ("base", "arguments", "facts"),
    [
        (BASE, {}, ["the plan says 96x32, the model has 576x192", "base_args="]),
        (BASE, {**ARGUMENTS, "depth": 3}, ["missing: blocks.2"]),
        (BASE, {**ARGUMENTS, "depth": 1}, ["no module of that name", "blocks.1"]),
        (BASE, {**ARGUMENTS, "embed_dim": 64}, ["blocks.0"]),
        (BASE, {**ARGUMENTS, "pretrained": True}, ["may not set pretrained"]),
        ("vit_pytorch:ViT", {}, ["vit_pytorch:ViT cannot be built"]),
        ("nonesuch", {}, ["no model 'nonesuch'"]),
        ("json:loads", {}, ["vit_pytorch:CLASS"]),
    ],
)
def test_base_that_does_not_rebuild_the_model(base: str, arguments: dict[str, object], facts: list[str], tmp_path: Path) -> None:
    model = install_random(small_model(), base=base, base_args=arguments)
    message = refused(model, tmp_path / "model")
    assert all(fact in message for fact in facts), message


def test_model_changed_after_conversion(tmp_path: Path) -> None:
    model = install_random(small_model())
    model.norm = nn.LayerNorm(32, elementwise_affine=False)
    assert "norm.weight" in refused(model, tmp_path / "model")


def test_model_on_meta(tmp_path: Path) -> None:
    assert "meta device" in refused(install_random(small_model()).to("meta"), tmp_path / "model")


def test_buffer_that_the_base_lacks(tmp_path: Path) -> None:
    model = install_random(small_model())
    model.blocks[0].register_buffer("scale", torch.ones(2), persistent=False)
    assert "buffers" in (message := refused(model, tmp_path / "model")) and "blocks.0.scale" in message


def test_numbers_beyond_the_dtype(converted: tuple[nn.Module, Report], tmp_path: Path) -> None:
    model = copy.deepcopy(converted[0])
    with torch.no_grad():
        model.head.weight[0, 0] = 1e6
    message = refused(model, tmp_path / "model", dtype="float16")
    assert "head.weight" in message and "float16" in message
    save(model, tmp_path / "model", dtype="bfloat16")


def test_unknown_dtype(converted: tuple[nn.Module, Report], tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="float16, bfloat16, float32, float64, got int4"):
        save(converted[0], tmp_path / "model", dtype="int4")
    assert not any(tmp_path.iterdir())
