"""Write a dense model into a folder in timm's own layout."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import nn

from flysurgery.checkpoint.config import data_of
from flysurgery.checkpoint.folder import check_target, new_folder

FILES = ("model.safetensors", "config.json")


def check_dense_folder(folder: Path, *, force: bool) -> Path:
    """The folder with symbolic links followed, once it is sure that ``save_dense`` may write there.

    Raises:
        CheckpointError: it exists and may not be replaced; the message says why and what to do.
    """
    target = folder.expanduser().resolve()
    check_target(target, replaceable=all((target / name).is_file() for name in FILES), force=force)
    return target


def save_dense(model: nn.Module, folder: Path, base: str, base_args: Mapping[str, Any], *, force: bool) -> None:
    """Write ``model.safetensors`` and ``config.json``; timm opens the folder as ``local-dir:DIR``, flysurgery as a MODEL.

    The folder appears complete or not at all. Tensors that the model uses twice are written twice, as timm reads them.

    Raises:
        CheckpointError: the folder exists and may not be replaced, or the system refuses to write.
    """
    target = check_dense_folder(folder, force=force)
    config = json.dumps(_config(model, base, base_args), indent=2, allow_nan=False)
    with new_folder(target, force=force) as fresh:
        weights = {name: tensor.detach().cpu().clone().contiguous() for name, tensor in model.state_dict().items()}
        save_file(weights, fresh / FILES[0], metadata={"format": "pt"})
        (fresh / FILES[1]).write_text(config + "\n", encoding="utf-8")
        # safetensors makes files that only their owner may read; this one is to be read like its neighbour.
        (fresh / FILES[0]).chmod((fresh / FILES[1]).stat().st_mode)


def _config(model: nn.Module, base: str, base_args: Mapping[str, Any]) -> dict[str, Any]:
    data = data_of(model)
    classes = getattr(model, "num_classes", None)
    if classes is not None:
        data["num_classes"] = classes
    # A tag names published weights, which these are not.
    return {"architecture": base if ":" in base else base.partition(".")[0], "model_args": dict(base_args), "pretrained_cfg": data}
