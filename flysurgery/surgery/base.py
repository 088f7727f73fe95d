"""How the dense model is built again: a name and the arguments of its constructor."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import timm
from torch import nn

from flysurgery.errors import OptionError
from flysurgery.surgery.transformers_models import is_of_transformers, transformers_arguments

ENTRY_POINT = "flysurgery_structured"
"""The name under which converted models are registered with timm. It is never a base."""


def find_base(model: nn.Module, base: str | None, base_args: Mapping[str, Any] | None) -> tuple[str | None, dict[str, Any]]:
    """The given ``base``, else the one that a timm model names; ``base_args`` replace what the model says.

    A timm model names its architecture and its weights' tag, and keeps the arguments that it was built with; classes, channels, image
    size and pooling are read from its present state. A model of transformers has its configuration. Other models, and timm models built
    with arguments that JSON does not have (a function, say), give None: such a model is saved only with a given base.

    Raises:
        OptionError: ``base_args`` do not fit into JSON.
    """
    given = _as_json(dict(base_args or {}))
    if given is None:
        raise OptionError(f"base_args must be values that JSON has (texts, numbers, lists, ...), got {base_args!r}")
    if base is not None:
        return base, given
    if is_of_transformers(model):
        return f"transformers:{type(model).__name__}", transformers_arguments(model.config.to_dict()) | given  # pyright: ignore
    config = getattr(model, "pretrained_cfg", None) or {}
    architecture, tag = config.get("architecture"), config.get("tag")
    if not architecture:
        return None, given
    found = _as_json(_timm_arguments(model, config))
    if found is None:
        return None, given
    return f"{architecture}.{tag}" if tag else architecture, found | given


def is_of_timm(model: nn.Module) -> bool:
    """Whether the model says of itself what timm's say."""
    config = getattr(model, "pretrained_cfg", None)
    return isinstance(config, dict) and bool(config.get("architecture"))


def _timm_arguments(model: nn.Module, config: Mapping[str, Any]) -> dict[str, Any]:
    reader = getattr(timm.models, "get_model_args", None)
    if reader is not None:
        return dict(reader(model))
    # Before timm 1.0.31 models did not keep their arguments, so only what differs from the published ones is known.
    channels, *size = config.get("input_size", (None, None, None))
    current = {
        "num_classes": (getattr(model, "num_classes", None), config.get("num_classes")),
        "in_chans": (getattr(model, "in_chans", None), channels),
        "img_size": (getattr(getattr(model, "patch_embed", None), "img_size", None), tuple(size)),
    }
    return {name: value for name, (value, published) in current.items() if value is not None and value != published}


def _as_json(arguments: dict[str, Any]) -> dict[str, Any] | None:
    try:
        return json.loads(json.dumps(arguments, allow_nan=False))
    except (TypeError, ValueError):
        return None
