"""The folder's ``config.json``, as timm or transformers reads it, and what a ``pretrained_cfg`` says of images, classes and weights."""

import json
import math
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from timm.data.config import resolve_data_config
from timm.data.transforms_factory import create_transform
from timm.models import PretrainedCfg, filter_pretrained_cfg
from torch import nn

from flysurgery.checkpoint.base import ENTRY_POINT, TRANSFORMERS
from flysurgery.checkpoint.files import read_json
from flysurgery.errors import CheckpointError, PlanError, raised_as
from flysurgery.surgery import QUANT_METHOD, Plan, quantization_entry, transformers_arguments

PROCESSOR = "preprocessor_config.json"
"""The file with the settings of an image processor of transformers."""

WEIGHT_SOURCES = frozenset({"url", "file", "state_dict", "hf_hub_id", "hf_hub_filename", "source", "custom_load"})
"""Entries of a ``pretrained_cfg`` that say where weights come from; a folder's own weights are the only ones."""

CLAIMS = frozenset({"tag", "license", "description", "origin_url", "paper_name", "paper_ids", "notes"})
"""Entries that say whose the weights are."""

LABELS = frozenset({"label_names", "label_descriptions", "label_offset"})
"""Entries that say what the classes are."""


def config_of(model: nn.Module, plan: Plan) -> dict[str, Any]:
    """What ``config.json`` holds for a converted model; one of transformers has its own configuration.

    For others the architecture is the registered entry point, never the dense name: under that one timm would fill a model of another
    number of classes with random dense layers, and only warn.
    """
    own: Any = model
    if (plan.base or "").startswith(TRANSFORMERS):
        entries = {"architectures": [type(model).__name__], "dtype": str(own.dtype).removeprefix("torch.")}
        config = own.config.to_dict() | entries | {"quantization_config": quantization_entry(plan)}
        return json.loads(json.dumps(config))
    data = data_config(model, plan.base_args)
    config = {
        "architecture": ENTRY_POINT,
        "num_classes": data.get("num_classes"),
        "num_features": getattr(model, "num_features", None),
        "model_args": {"base": plan.base, "base_args": dict(plan.base_args), "plan": plan.to_json()},
        "pretrained_cfg": data,
    }
    return {name: value for name, value in config.items() if value is not None}


def read_config(folder: Path) -> dict[str, Any]:
    """Parse ``config.json``, which must be an object as timm or transformers write it (CheckpointError)."""
    file = folder / "config.json"
    try:
        config = read_json(file)
    except FileNotFoundError as error:
        raise CheckpointError(f"{folder} is no checkpoint: it has no config.json") from error
    if isinstance(config, dict) and is_of_transformers(config):
        return config
    if not isinstance(config, dict) or not isinstance(config.get("architecture"), str):
        raise CheckpointError(f"{file} is no timm configuration: it names no architecture")
    for name in ("model_args", "pretrained_cfg"):
        if not isinstance(config.setdefault(name, {}), dict):
            raise CheckpointError(f"{file}: '{name}' must be an object")
    return config


def is_of_transformers(config: Mapping[str, Any]) -> bool:
    """Whether a ``config.json`` is that of a converted model of transformers."""
    entry = config.get("quantization_config")
    return isinstance(entry, dict) and entry.get("quant_method") == QUANT_METHOD


def plan_in(config: Mapping[str, Any], folder: Path) -> Plan:
    """The plan that ``config.json`` holds, with the base and its arguments (CheckpointError).

    Arguments that timm's ``save_for_hf`` noted beside the plan are those that have changed since.
    """
    file = folder / "config.json"
    try:
        if is_of_transformers(config):
            plan, classes = Plan.from_json(config["quantization_config"].get("plan")), config.get("architectures")
            if not (isinstance(classes, list) and len(classes) == 1 and isinstance(classes[0], str)):
                raise CheckpointError(f"{file}: 'architectures' must be a list of one class of transformers, got {classes!r:.60}")
            return replace(plan, base=TRANSFORMERS + classes[0], base_args=transformers_arguments(config))
        plan = Plan.from_json(config["model_args"].get("plan"))
    except PlanError as error:
        raise CheckpointError(f"{file} holds a plan that cannot be used: {error}") from error
    changed = {name: value for name, value in config["model_args"].items() if name not in ("base", "base_args", "plan")}
    return plan.with_arguments(changed)


def describe(model: nn.Module, config: Mapping[str, Any], folder: Path) -> None:
    """Tell a loaded model what its folder says of images and classes."""
    own: Any = model
    if is_of_transformers(config):
        labels = config.get("id2label")  # the names of the classes, which do not change what is built
        if isinstance(labels, dict) and len(labels) == len(own.config.id2label or {}):
            own.config.id2label = {int(number): str(label) for number, label in labels.items() if str(number).isdecimal()}
            own.config.label2id = {label: number for number, label in own.config.id2label.items()}
        with suppress(FileNotFoundError):
            describe_images(model, read_json(folder / PROCESSOR))
    else:
        describe_data(model, config["pretrained_cfg"])


def describe_images(model: nn.Module, processor: Mapping[str, Any]) -> None:
    """Note on a model how its images are scaled and normalized, by the settings of an image processor (CheckpointError for bad ones).

    The mean and the standard deviation that are noted are those of pixels from 0 to 1, also where the processor scales otherwise.
    """
    if not isinstance(processor, Mapping):
        raise _unusable(" must hold a JSON object", processor)
    found = {name: processor[f"image_{name}"] for name in ("mean", "std") if processor.get(f"image_{name}") is not None}
    if processor.get("do_normalize") is False:
        found = {"mean": [0.0], "std": [1.0]}
    for name, values in found.items():
        right = isinstance(values, list) and values and all(type(value) in (int, float) and math.isfinite(value) for value in values)
        if not right or (name == "std" and min(values) <= 0):
            raise _unusable(f": image_{name} must be a list of numbers", values)
    factor = 1 if processor.get("do_rescale") is False else processor.get("rescale_factor")
    if factor is not None and (type(factor) not in (int, float) or not 0 < factor < math.inf):
        raise _unusable(": rescale_factor must be a positive number", factor)
    scale = 1 if factor is None else 255 * factor  # what becomes of a white pixel before the mean is subtracted
    if not math.isclose(scale, 1, rel_tol=1e-6):
        found = {name: [value / scale for value in found.get(name, [float(name == "std")])] for name in ("mean", "std")}
    if found:
        own: Any = model
        own.pretrained_cfg, own.image_processor = found, dict(processor)


def _unusable(what: str, value: object) -> CheckpointError:
    return CheckpointError(f"{PROCESSOR}{what}, got {value!r:.60}; correct it, or remove the file")


def processor_of(model: nn.Module) -> Mapping[str, Any]:
    """The settings that ``describe_images`` noted; empty where there are none."""
    return getattr(model, "image_processor", {})


def describe_data(model: nn.Module, pretrained_cfg: Mapping[str, Any]) -> None:
    """Tell a timm model what its weights were trained on, as ``timm.data`` reads it: mean, std, crop, labels, ...

    What the architecture says of published weights (source, tag, licence) is taken away. Raises a CheckpointError where timm cannot use it.
    """
    if not hasattr(model, "pretrained_cfg"):
        return
    with raised_as(CheckpointError, "the pretrained_cfg of config.json cannot be used"):
        create_transform(**resolve_data_config({}, pretrained_cfg=dict(pretrained_cfg)))
    known = {each.name for each in fields(PretrainedCfg)} - WEIGHT_SOURCES - {"architecture"}
    found = {name: tuple(value) if isinstance(value, list) else value for name, value in pretrained_cfg.items() if name in known}
    own: Any = model
    own.pretrained_cfg = own.default_cfg = _without(own.pretrained_cfg, WEIGHT_SOURCES | CLAIMS | LABELS) | found


def vouch_for_weights(model: nn.Module) -> None:
    """Note on a timm model that it has the weights that its ``pretrained_cfg`` names, so that a folder may say so."""
    own: Any = model
    own.pretrained_cfg = own.default_cfg = _without(own.pretrained_cfg, WEIGHT_SOURCES)


def data_config(model: nn.Module, base_args: Mapping[str, Any]) -> dict[str, Any]:
    """The ``pretrained_cfg`` of a folder with the model's own weights: what its own says that holds there, and its sizes as they are.

    One that names a source is its architecture's, whether or not the weights came from there; its tag and licence are left out.
    """
    own = getattr(model, "pretrained_cfg", None)
    if own is None:
        classes = base_args.get("num_classes")
        return {} if classes is None else {"num_classes": classes}
    names_source = any(own.get(name) for name in WEIGHT_SOURCES)
    kept = filter_pretrained_cfg(dict(own), remove_source=True, remove_null=True)
    found = _without(kept, WEIGHT_SOURCES | {"architecture"} | (CLAIMS if names_source else set()))
    classes = getattr(model, "num_classes", found.get("num_classes"))
    if classes != found.get("num_classes"):
        found = _without(found, LABELS)
    if "input_size" in found:
        size = getattr(getattr(model, "patch_embed", None), "img_size", None) or found["input_size"][1:]
        found["input_size"] = [getattr(model, "in_chans", found["input_size"][0]), *size]
    return found if classes is None else found | {"num_classes": classes}


def _without(entries: Any, names: Collection[str]) -> dict[str, Any]:
    return {name: value for name, value in entries.items() if name not in names}
