"""Dense local folders in timm's layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from torch import nn

from flysurgery.checkpoint import build_base, load_dense
from flysurgery.errors import CheckpointError, ModelError
from tests.checkpoint.conftest import outputs, small_model


@pytest.fixture(params=[True, False], ids=["safetensors", "torch file"])
def dense(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[nn.Module, Path]:
    model = small_model()
    nn.init.normal_(model.head.weight)
    timm.models.save_for_hf(model, str(tmp_path / "dense"), safe_serialization=request.param)
    return model, tmp_path / "dense"


def test_opens_what_timm_saved(dense: tuple[nn.Module, Path]) -> None:
    model, folder = dense
    loaded, base, base_args = load_dense(folder)
    assert torch.equal(outputs(loaded), outputs(model)) and not loaded.training
    assert base == "vit_tiny_patch16_224"
    rebuilt = build_base(base, base_args, device="meta")
    assert {n: t.shape for n, t in rebuilt.state_dict().items()} == {n: t.shape for n, t in model.state_dict().items()}


def test_sizes_come_from_the_data_where_no_arguments_are_saved(tmp_path: Path) -> None:
    """Published folders say only num_classes, pooling and input size."""
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, num_classes=3, in_chans=1, depth=12)
    timm.models.save_for_hf(model, str(tmp_path), safe_serialization=True)
    edit(tmp_path, lambda config: config.pop("model_args"))
    loaded, _, base_args = load_dense(tmp_path)
    assert base_args == {"num_classes": 3, "in_chans": 1, "img_size": [32, 32], "global_pool": "token"}
    assert loaded.pos_embed.shape == model.pos_embed.shape


def test_only_the_folder_says_what_the_weights_are(dense: tuple[nn.Module, Path]) -> None:
    _, folder = dense
    edit(folder, lambda config: config["pretrained_cfg"].update(mean=[0.1, 0.2, 0.3], tag=None, license=None))
    found = load_dense(folder)[0].pretrained_cfg
    assert found["mean"] == (0.1, 0.2, 0.3)
    assert not any(found.get(name) for name in ("tag", "license", "url", "hf_hub_id"))


@pytest.mark.parametrize(
    ("change", "error", "fact"),
    [
        ({"architecture": "flysurgery_structured"}, CheckpointError, "flysurgery.load"),
        ({"architecture": "nonesuch"}, ModelError, "nonesuch"),
        ({"architecture": 3}, CheckpointError, "names no architecture"),
        ({"model_args": {"depth": 5}}, ModelError, "missing: blocks.2"),
        ({"model_args": {"pretrained": True}}, ModelError, "may not set pretrained"),
    ],
)
def test_folders_that_are_refused(change: dict[str, Any], error: type[Exception], fact: str, dense: tuple[nn.Module, Path]) -> None:
    edit(dense[1], lambda config: config.update(change))
    with pytest.raises(error, match=fact):
        load_dense(dense[1])


def test_missing_parts(dense: tuple[nn.Module, Path], tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="there is no folder"):
        load_dense(tmp_path / "nowhere")
    for name in ("model.safetensors", "pytorch_model.bin"):
        (dense[1] / name).unlink(missing_ok=True)
    with pytest.raises(CheckpointError, match=r"holds no weights: expected model\.safetensors or pytorch_model\.bin"):
        load_dense(dense[1])


def edit(folder: Path, change: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))
