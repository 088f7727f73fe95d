"""Models that could not be loaded again: refused before anything is written."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

from flysurgery.checkpoint import save
from flysurgery.errors import CheckpointError, OptionError
from tests.checkpoint.conftest import ARGUMENTS, BASE, Converted, install_random, small_model


def refused(model: nn.Module, folder: Path, **options: object) -> str:
    """The one sentence with which saving is refused; it leaves nothing behind."""
    with pytest.raises(CheckpointError) as caught:
        save(model, folder / "model", **options)
    assert not any(folder.iterdir())
    message = str(caught.value)
    assert "\n" not in message and len(message) < 800, message
    return message


def test_models_that_hold_no_plan_base_or_values(tmp_path: Path) -> None:
    assert "not converted" in refused(small_model(), tmp_path)
    dense = small_model()
    dense.pretrained_cfg = {}
    message = refused(install_random(dense), tmp_path)
    assert "base=" in message and "base_args=" in message
    assert "meta device" in refused(install_random(small_model()).to("meta"), tmp_path)


@pytest.mark.parametrize(
    ("base", "arguments", "facts"),
    [
        (BASE, {}, ["the plan says 96x32, the model has 576x192", "base_args="]),
        (BASE, {**ARGUMENTS, "depth": 3}, ["missing: blocks.2"]),
        (BASE, {**ARGUMENTS, "depth": 1}, ["no module of that name", "blocks.1"]),
        (BASE, {**ARGUMENTS, "pretrained": True}, ["may not set pretrained"]),
        ("vit_pytorch:ViT", {}, ["vit_pytorch:ViT cannot be built"]),
        ("nonesuch", {}, ["no model 'nonesuch'"]),
        ("json:loads", {}, ["vit_pytorch:CLASS"]),
    ],
)
def test_base_that_does_not_rebuild_the_model(base: str, arguments: dict[str, object], facts: list[str], tmp_path: Path) -> None:
    message = refused(install_random(small_model(), base=base, base_args=arguments), tmp_path)
    assert all(fact in message for fact in facts), message


def test_model_changed_after_conversion(tmp_path: Path) -> None:
    model = install_random(small_model())
    model.blocks[0].register_buffer("scale", torch.ones(2), persistent=False)
    assert "buffers" in (message := refused(model, tmp_path)) and "blocks.0.scale" in message
    model.norm = nn.LayerNorm(32, elementwise_affine=False)
    assert "norm.weight" in refused(model, tmp_path)


def test_dtypes_that_cannot_be_stored(converted: Converted, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="float16, bfloat16, float32, float64, got int4"):
        save(converted[0], tmp_path / "model", dtype="int4")
    model = copy.deepcopy(converted[0])
    with torch.no_grad():
        model.head.weight[0, 0] = 1e6
    message = refused(model, tmp_path, dtype="float16")
    assert "head.weight" in message and "float16" in message
    save(model, tmp_path / "model", dtype="bfloat16")
