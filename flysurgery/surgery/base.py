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
    found = _as_json(dict(timm.models.get_model_args(model)))
    if found is None:
        return None, given
    return f"{architecture}.{tag}" if tag else architecture, found | given


def is_of_timm(model: nn.Module) -> bool:
    """Whether the model says of itself what timm's say."""
    config = getattr(model, "pretrained_cfg", None)
    return isinstance(config, dict) and bool(config.get("architecture"))


def _as_json(arguments: dict[str, Any]) -> dict[str, Any] | None:
    try:
        return json.loads(json.dumps(arguments, allow_nan=False))
    except (TypeError, ValueError):
        return None
