"""What models of transformers say of themselves, and how their configuration says that they are converted. transformers is not imported."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from flysurgery.surgery.plan import Plan

QUANT_METHOD = "flysurgery"
"""The name under which transformers finds the reader of converted models."""

DESCRIPTIONS = frozenset({"architectures", "dtype", "id2label", "label2id", "quantization_config", "transformers_version", "_name_or_path"})
"""Entries of a configuration of transformers that do not change what is built."""


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
