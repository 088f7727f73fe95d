"""Rewrite the files of a checkpoint as damage or an attacker would."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from flysurgery.checkpoint.header import canonical
from flysurgery.checkpoint.tensors import SAFETENSORS_DTYPES, sha256_of_each

Tensors = dict[str, Tensor]
Metadata = dict[str, str]


def read_weights(folder: Path) -> tuple[Tensors, Metadata]:
    """All tensors and the header's entries."""
    with safe_open(folder / "model.safetensors", "pt") as handle:
        return {name: handle.get_tensor(name).clone() for name in handle.keys()}, dict(handle.metadata())  # noqa: SIM118


def rewrite(folder: Path, change: Callable[[Tensors, Metadata], object]) -> None:
    """Let ``change`` edit the tensors and the header's entries."""
    tensors, metadata = read_weights(folder)
    change(tensors, metadata)
    save_file(tensors, folder / "model.safetensors", metadata)


def list_tensors(tensors: Tensors, metadata: Metadata) -> None:
    """Make the header's list of tensors true of them and of the aliases."""
    dtypes = {dtype: name for name, dtype in SAFETENSORS_DTYPES.items()}
    listed = {
        name: [dtypes.get(tensors[name].dtype, "F8_E4M3"), sha256] for name, sha256 in sha256_of_each(tensors, tensors.__getitem__).items()
    }
    metadata["tensors"] = canonical(listed)
    metadata["tensors_sha256"] = hashlib.sha256((metadata["tensors"] + metadata.get("aliases", "")).encode()).hexdigest()


def rewrite_listed(folder: Path, change: Callable[[Tensors, Metadata], object]) -> None:
    """``rewrite`` with a header whose hashes match."""
    rewrite(folder, lambda tensors, metadata: (change(tensors, metadata), list_tensors(tensors, metadata)))


def make_old(folder: Path) -> None:
    """Leave out what the first versions did not write: the list of tensors, with their dtypes and hashes."""
    rewrite(folder, lambda _, metadata: [metadata.pop(name) for name in ("tensors", "tensors_sha256")])


def rewrite_config(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Let ``change`` edit ``config.json``."""
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))


def forge(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Let ``change`` edit the plan everywhere that it stands, and make all hashes match."""

    def edit(tensors: Tensors, metadata: Metadata) -> None:
        plan = json.loads(metadata["plan"])
        change(plan)
        metadata["plan"], metadata["base"] = canonical(plan), plan["base"]
        metadata["plan_sha256"] = hashlib.sha256(metadata["plan"].encode()).hexdigest()
        description = canonical({"base": plan["base"], "base_args": plan["base_args"]})
        metadata["base_sha256"] = hashlib.sha256(description.encode()).hexdigest()
        arguments = {"base": plan["base"], "base_args": plan["base_args"], "plan": plan}
        rewrite_config(folder, lambda config: config.update(model_args=arguments))

    rewrite(folder, edit)
