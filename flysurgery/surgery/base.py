"""What models of timm and of transformers say of themselves: how the dense model is built again, its classes, that it is converted.

transformers is not imported.
"""

import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import timm
from torch import nn

from flysurgery.errors import OptionError
from flysurgery.surgery.plan import Plan

ENTRY_POINT = "flysurgery_structured"
"""The name under which converted models are registered with timm. It is never a base."""

QUANT_METHOD = "flysurgery"
"""The name under which transformers finds the reader of converted models."""

DESCRIPTIONS = frozenset({"architectures", "dtype", "id2label", "label2id", "quantization_config", "transformers_version", "_name_or_path"})
"""Entries of a configuration of transformers that do not change what is built."""


def find_base(model: nn.Module, base: str | None, base_args: Mapping[str, Any] | None) -> tuple[str | None, dict[str, Any]]:
    """The given ``base``, else the one that a timm model names; ``base_args`` replace what the model says.

    A timm model names its architecture and its weights' tag, and keeps the arguments that it was built with; classes, channels, image
    size and pooling are read from its present state. A model of transformers has its configuration. Other models, and timm models built
    with arguments that JSON does not have (a function, say), give None: such a model is saved only with a given base.

    Raises:
        OptionError: ``base`` is no name, or ``base_args`` do not fit into JSON.
    """
    if base is not None and not isinstance(base, str):
        raise OptionError(f"base is the name of a dense model, such as 'vit_small_patch16_224', got {base!r}")
    given = _as_json(dict(base_args)) if isinstance(base_args, Mapping) else None if base_args else {}
    if given is None:
        raise OptionError(f"base_args must be values that JSON has (texts, numbers, lists, ...), got {base_args!r}")
    if base is not None:
        return base, given
    if is_of_transformers(model):
        return f"transformers:{type(model).__name__}", transformers_arguments(model.config.to_dict()) | given  # pyright: ignore
    config = getattr(model, "pretrained_cfg", None) or {}
    architecture, tag = config.get("architecture"), config.get("tag")
    found = _as_json(_timm_arguments(model, config)) if architecture else None
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


def is_of_transformers(model: nn.Module) -> bool:
    """Whether the model's class is one that transformers offers."""
    transformers = sys.modules.get("transformers")
    return transformers is not None and getattr(transformers, type(model).__name__, None) is type(model)


def transformers_arguments(config: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of a configuration of transformers that decide what is built; of the classes only their number."""
    found = json.loads(json.dumps({name: value for name, value in config.items() if name not in DESCRIPTIONS}))
    labels = config.get("id2label")
    return found | {"num_labels": len(labels)} if isinstance(labels, Mapping) else found


def quantization_entry(plan: Plan) -> dict[str, Any]:
    """The entry ``quantization_config`` of a configuration, by which transformers knows replaced layers.

    It holds the plan without its base, which the configuration itself is.
    """
    return {"quant_method": QUANT_METHOD, "plan": replace(plan, base=None, base_args={}).to_json()}


def classes_of(model: nn.Module) -> int | None:
    """How many classes a model tells apart: 0 for one without a head, None where the model does not say."""
    if is_of_transformers(model):
        config: Any = model.config
        return config.num_labels if "Classification" in type(model).__name__ else 0
    classes = getattr(model, "num_classes", None)
    return classes if isinstance(classes, int) else None
