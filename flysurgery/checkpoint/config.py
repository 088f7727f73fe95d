"""The folder's ``config.json``, in the shape that timm reads."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from timm.models import PretrainedCfg, filter_pretrained_cfg
from torch import nn

from flysurgery.checkpoint.base import ENTRY_POINT
from flysurgery.checkpoint.data_config import check_data
from flysurgery.checkpoint.header import parse_json
from flysurgery.checkpoint.regular import read_text
from flysurgery.errors import CheckpointError
from flysurgery.surgery import Plan

WEIGHT_SOURCES = frozenset({"url", "file", "state_dict", "hf_hub_id", "hf_hub_filename", "source", "custom_load"})
"""Entries of a ``pretrained_cfg`` that say where weights come from; a folder's own weights are the only ones."""

CLAIMS = frozenset({"tag", "license", "description", "origin_url", "paper_name", "paper_ids", "notes"})
"""Entries that say whose the weights are."""

ABOUT_WEIGHTS = WEIGHT_SOURCES | CLAIMS | {"label_names", "label_descriptions", "label_offset"}
"""Entries that are true of certain weights, not of their architecture."""


def config_of(model: nn.Module, plan: Plan, *, optimize: bool = False) -> dict[str, Any]:
    """What ``config.json`` holds for a converted model; ``optimize`` asks ``load`` for fused modules, and changes no weight.

    The architecture is the registered entry point, never the dense name: under that one timm would fill a model of
    another number of classes with random dense layers, and only warn.
    """
    data = _data_config(model, plan)
    config = {
        "architecture": ENTRY_POINT,
        "num_classes": data.get("num_classes"),
        "num_features": getattr(model, "num_features", None),
        "model_args": {"base": plan.base, "base_args": dict(plan.base_args), "plan": plan.to_json()},
        "pretrained_cfg": data,
        "optimize": optimize or None,
    }
    return {name: value for name, value in config.items() if value is not None}


def read_config(folder: Path) -> dict[str, Any]:
    """Parse ``config.json``.

    Raises:
        CheckpointError: it is missing, no JSON, or not a timm-shaped object.
    """
    file = folder / "config.json"
    try:
        config = parse_json(read_text(file))
    except FileNotFoundError as error:
        raise CheckpointError(f"{folder} is no checkpoint: it has no config.json") from error
    except CheckpointError:
        raise
    except ValueError as error:
        raise CheckpointError(f"{file} cannot be read as JSON: {error}") from error
    if not isinstance(config, dict) or not isinstance(config.get("architecture"), str):
        raise CheckpointError(f"{file} is no timm configuration: it names no architecture")
    for name in ("model_args", "pretrained_cfg"):
        if not isinstance(config.setdefault(name, {}), dict):
            raise CheckpointError(f"{file}: '{name}' must be an object")
    return config


def check_config(config: Mapping[str, Any], plan: Plan, folder: Path) -> None:
    """Hold ``config.json`` against the header's plan. timm builds from the one, the weights were saved with the other.

    Raises:
        CheckpointError: they disagree, or ``config.json`` asks for more; the message names what differs.
    """
    if config["architecture"] != ENTRY_POINT:
        raise CheckpointError(f"{folder / 'config.json'} names architecture '{config['architecture']}', expected '{ENTRY_POINT}'")
    expected = {"base": plan.base, "base_args": dict(plan.base_args), "plan": plan.to_json()}
    differing = [name for name, value in expected.items() if config["model_args"].get(name) != json.loads(json.dumps(value))]
    if differing:
        raise CheckpointError(f"{folder / 'config.json'} does not match model.safetensors: {', '.join(differing)} differ; one was changed")
    added = sorted(set(config["model_args"]) - set(expected))
    if added:
        raise CheckpointError(
            f"{folder / 'config.json'} sets {', '.join(added[:3])} in model_args, which would change the model; remove them, "
            "and give such arguments to timm.create_model"
        )
    if not isinstance(config.get("optimize", False), bool):
        raise CheckpointError(f"{folder / 'config.json'}: 'optimize' must be true or false")


def check_description(config: Mapping[str, Any], model: nn.Module, plan: Plan, folder: Path) -> None:
    """Hold what ``config.json`` says of data and sizes against the model that the header describes.

    Raises:
        CheckpointError: a value that ``timm.data`` cannot use, or another number of classes or features than the model's.
    """
    file = folder / "config.json"
    check_data(config["pretrained_cfg"], f"{file}: pretrained_cfg")
    has = {
        "num_classes": getattr(model, "num_classes", plan.base_args.get("num_classes")),
        "num_features": getattr(model, "num_features", None),
    }
    for where, found in (("", config), ("pretrained_cfg.", config["pretrained_cfg"])):
        for name, value in has.items():
            if found.get(name) is not None and value is not None and found[name] != value:
                raise CheckpointError(f"{file}: {where}{name} is {found[name]!r:.40}, and the model of model.safetensors has {value}")


def describe_data(model: nn.Module, pretrained_cfg: Mapping[str, Any]) -> None:
    """Tell a timm model what its weights were trained on, as ``timm.data`` reads it: mean, std, crop, labels, ...

    What the model's architecture says of the weights that timm publishes for it (source, tag, licence) is taken away.
    """
    if not hasattr(model, "pretrained_cfg"):
        return
    known = {each.name for each in fields(PretrainedCfg)} - WEIGHT_SOURCES - {"architecture"}
    found = {name: tuple(value) if isinstance(value, list) else value for name, value in pretrained_cfg.items() if name in known}
    described: Any = model  # timm's models keep plain dicts under these names, which nn.Module does not declare
    kept = {name: value for name, value in described.pretrained_cfg.items() if name not in ABOUT_WEIGHTS}
    described.pretrained_cfg = described.default_cfg = {**kept, **found}


def vouch_for_weights(model: nn.Module) -> None:
    """Note on a timm model that it has the weights that its ``pretrained_cfg`` names, so that a folder may say so."""
    described: Any = model
    kept = {name: value for name, value in described.pretrained_cfg.items() if name not in WEIGHT_SOURCES}
    described.pretrained_cfg = described.default_cfg = kept


def data_of(model: nn.Module) -> dict[str, Any]:
    """What a timm model's ``pretrained_cfg`` says that holds in a folder of its own weights.

    One that names a source is its architecture's, and the same whether the weights were taken from there or not; its tag and licence
    are left out.
    """
    own = dict(getattr(model, "pretrained_cfg", None) or {})
    names_source = any(own.get(name) for name in WEIGHT_SOURCES)
    found = filter_pretrained_cfg(own, remove_source=True, remove_null=True)
    left_out = WEIGHT_SOURCES | {"architecture"} | (CLAIMS if names_source else set())
    return {name: value for name, value in found.items() if name not in left_out}


def _data_config(model: nn.Module, plan: Plan) -> dict[str, Any]:
    if getattr(model, "pretrained_cfg", None) is None:
        sizes = {"num_classes": plan.base_args.get("num_classes")}
        return {name: value for name, value in sizes.items() if value is not None}
    found = data_of(model)
    classes = getattr(model, "num_classes", found.get("num_classes"))
    if classes != found.get("num_classes"):
        found = {name: value for name, value in found.items() if name not in ("label_names", "label_descriptions", "label_offset")}
    size = getattr(getattr(model, "patch_embed", None), "img_size", None) or found["input_size"][1:]
    channels = getattr(model, "in_chans", found["input_size"][0])
    return found | {"num_classes": classes, "input_size": [channels, *size]}
