"""Converted folders that were damaged or made up: each is refused in one sentence, by every verb that opens one."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from flysurgery.checkpoint.header import canonical
from tests.cli.conftest import Refused

Tensors = dict[str, Tensor]
Metadata = dict[str, str]


def rewrite(folder: Path, change: Callable[[Tensors, Metadata], None]) -> None:
    """Let ``change`` edit the tensors and the header of the folder's weights."""
    file = folder / "model.safetensors"
    with safe_open(file, "pt") as handle:
        tensors, metadata = {name: handle.get_tensor(name) for name in handle.keys()}, dict(handle.metadata())  # noqa: SIM118
    change(tensors, metadata)
    save_file(tensors, file, metadata=metadata)


def rewrite_plan(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Let ``change`` edit the plan, and make the hash and the config agree with it, as a forger would."""
    import hashlib

    def edit(_: Tensors, metadata: Metadata) -> None:
        plan = json.loads(metadata["plan"])
        change(plan)
        metadata["plan"] = canonical(plan)
        metadata["plan_sha256"] = hashlib.sha256(metadata["plan"].encode()).hexdigest()
        config = json.loads((folder / "config.json").read_text())
        config["model_args"]["plan"] = plan
        (folder / "config.json").write_text(json.dumps(config))

    rewrite(folder, edit)


def change_hash(folder: Path) -> None:
    rewrite(folder, lambda _, metadata: metadata.update(plan=metadata["plan"].replace("blocks.0", "blocks.1", 1)))


def raise_schema(folder: Path) -> None:
    rewrite(folder, lambda _, metadata: metadata.update({"flysurgery.schema": "99"}))


def drop_header(folder: Path) -> None:
    rewrite(folder, lambda _, metadata: metadata.clear())


def drop_tensor(folder: Path) -> None:
    rewrite(folder, lambda tensors, _: tensors.__delitem__("blocks.0.mlp.fc1.factors.1"))


def add_tensor(folder: Path) -> None:
    rewrite(folder, lambda tensors, _: tensors.update(stranger=torch.zeros(2)))


def reshape_tensor(folder: Path) -> None:
    rewrite(folder, lambda tensors, _: tensors.update({"blocks.1.attn.qkv.q.factors.0": torch.zeros(1, 2, 3, 4)}))


def rename_module(folder: Path) -> None:
    rewrite_plan(folder, lambda plan: plan["layers"][0].update(fqn="blocks.7.attn.qkv"))


def grow_plan(folder: Path) -> None:
    rewrite_plan(folder, lambda plan: plan["layers"][0].update(in_features=10**12))


def grow_base(folder: Path) -> None:
    rewrite_plan(folder, lambda plan: plan["base_args"].update(embed_dim=10**12))


def pickle_weights(folder: Path) -> None:
    torch.save({"a": torch.zeros(2)}, folder / "model.safetensors")


def truncate(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def remove_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


DAMAGES = [
    (change_hash, ("plan_sha256",)),
    (raise_schema, ("schema 99", "schema 1")),
    (drop_header, ("model.safetensors",)),
    (drop_tensor, ("1 missing", "blocks.0.mlp.fc1.factors.1")),
    (add_tensor, ("1 unknown", "stranger")),
    (reshape_tensor, ("blocks.1.attn.qkv.q.factors.0", "[1, 2, 3, 4]")),
    (rename_module, ("blocks.7.attn.qkv",)),
    (grow_plan, ("blocks.0.attn.qkv",)),
    (grow_base, ("base",)),
    (pickle_weights, ("model.safetensors", "pickle")),
    (truncate, ("model.safetensors",)),
    (remove_weights, ("model.safetensors",)),
]


@pytest.mark.parametrize(("damage", "words"), DAMAGES, ids=[damage.__name__ for damage, _ in DAMAGES])
def test_a_damaged_folder_is_refused(
    refused: Refused, converted: Path, tmp_path: Path, damage: Callable[[Path], None], words: tuple[str, ...]
) -> None:
    shutil.copytree(converted, tmp_path / "model")
    damage(tmp_path / "model")
    refused("densify", "model", "--out", "dense", words=words)
    refused("evaluate", "model", "--data", "digits", words=words)
