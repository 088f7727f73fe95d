"""Dense models in local folders, in timm's own layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import timm
from torch import nn

from flysurgery.checkpoint.base import ENTRY_POINT, build_base
from flysurgery.checkpoint.config import describe_data, read_config
from flysurgery.checkpoint.weights import load_weights
from flysurgery.errors import CheckpointError, ModelError

WEIGHT_FILES = ("model.safetensors", "pytorch_model.bin")


def load_dense(folder: str | Path) -> tuple[nn.Module, str, dict[str, Any]]:
    """Open a dense model as ``timm.models.save_for_hf`` and the hub's timm repositories hold it: ``(model, base, base_args)``.

    ``build_base(base, base_args)`` builds the model again without its weights. It is in eval mode, and its
    ``pretrained_cfg`` says how its images are prepared, as in ``config.json``.

    Raises:
        CheckpointError: no such folder, a file of it is missing or damaged, or its model is a converted one.
        ModelError: the model cannot be built, or the weights are not its own.
    """
    path = Path(folder)
    if not path.is_dir():
        raise CheckpointError(f"there is no folder {path}")
    config = read_config(path)
    base = config["architecture"]
    if base == ENTRY_POINT:
        raise CheckpointError(f"{path} holds a converted model; open it with flysurgery.load")
    base_args = _arguments(base, config)
    model = build_base(base, base_args)
    weights = next((path / name for name in WEIGHT_FILES if (path / name).is_file()), None)
    if weights is None:
        raise CheckpointError(f"{path} holds no weights: expected {' or '.join(WEIGHT_FILES)}")
    load_weights(model, weights)
    describe_data(model, config["pretrained_cfg"])
    return model.eval(), base, base_args


def _arguments(base: str, config: dict[str, Any]) -> dict[str, Any]:
    """The arguments that timm would build the folder's model with: those it was saved with, over what its data say."""
    data = config["pretrained_cfg"]
    found: dict[str, Any] = {name: config.get(name, data.get(name)) for name in ("num_classes", "global_pool")}
    size = data.get("input_size")
    if isinstance(size, list) and len(size) == 3:
        found["in_chans"] = size[0]
        if data.get("fixed_input_size"):
            found["img_size"] = size[1:]
    published = _published(base)
    differing = {name: value for name, value in found.items() if value is not None and value != published.get(name)}
    return differing | dict(config["model_args"])


def _published(base: str) -> dict[str, Any]:
    try:
        known = timm.get_pretrained_cfg(base)
    except RuntimeError as error:
        raise ModelError(f"timm {timm.__version__} has no model '{base}'") from error
    if known is None:
        return {}
    return {"num_classes": known.num_classes, "in_chans": known.input_size[0], "img_size": list(known.input_size[1:])}
