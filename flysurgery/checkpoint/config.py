"""The folder's ``config.json``, as timm or transformers reads it, and what a ``pretrained_cfg`` says of images, classes and weights."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

from timm.models import PretrainedCfg, filter_pretrained_cfg
from torch import nn

from flysurgery.checkpoint.base import ENTRY_POINT, TRANSFORMERS
from flysurgery.checkpoint.files import read_json
from flysurgery.checkpoint.transformers_folder import PROCESSOR, base_of, describe_images, describe_labels, is_of_transformers
from flysurgery.errors import CheckpointError
from flysurgery.patterns import MAX_FEATURES
from flysurgery.surgery import Plan, quantization_entry, transformers_arguments

WEIGHT_SOURCES = frozenset({"url", "file", "state_dict", "hf_hub_id", "hf_hub_filename", "source", "custom_load"})
"""Entries of a ``pretrained_cfg`` that say where weights come from; a folder's own weights are the only ones."""

CLAIMS = frozenset({"tag", "license", "description", "origin_url", "paper_name", "paper_ids", "notes"})
"""Entries that say whose the weights are."""

LABELS = frozenset({"label_names", "label_descriptions", "label_offset"})
"""Entries that say what the classes are."""


Check = Callable[[Any], bool]


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) <= MAX_FEATURES


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= MAX_FEATURES


def _are(is_one: Check, value: Any) -> bool:
    return isinstance(value, list | tuple) and all(map(is_one, value))


def _are_sizes(value: Any) -> bool:
    return _are(_is_count, value) and 0 not in value


def _are_texts(value: Any) -> bool:
    return _is_text(value) or _are(_is_text, value)


def _are_descriptions(value: Any) -> bool:
    return _are_texts(value) or (isinstance(value, dict) and all(map(_is_text, (*value, *value.values()))))


KINDS: tuple[tuple[tuple[str, ...], Check, str], ...] = (
    (("interpolation", "crop_mode", "tag", "license", "description", "origin_url", "paper_name"), _is_text, "a text"),
    (("paper_ids", "notes", "first_conv", "classifier", "label_names"), _are_texts, "a text or a list of texts"),
    (("input_size", "test_input_size", "min_input_size"), lambda value: _are_sizes(value) and len(value) == 3, "a list of three sizes"),
    (("pool_size", "test_pool_size"), _are_sizes, "a list of sizes"),
    (("crop_pct", "test_crop_pct"), lambda value: _is_number(value) and value > 0, "a positive number"),
    (("mean", "std"), lambda value: _are(_is_number, value), "a list of numbers"),
    (("num_classes", "label_offset"), _is_count, f"a whole number of at most {MAX_FEATURES}"),
    (("fixed_input_size",), lambda value: isinstance(value, bool), "true or false"),
    (("label_descriptions",), _are_descriptions, "a map of texts to texts"),
)
"""What the entries of a ``pretrained_cfg`` that timm reads must be; other entries are not used."""


def config_of(model: nn.Module, plan: Plan, *, optimize: bool = False) -> dict[str, Any]:
    """What ``config.json`` holds for a converted model; ``optimize`` asks ``load`` for fused modules, and changes no weight.

    A model of transformers has its own configuration. For others the architecture is the registered entry point, never the dense name:
    under that one timm would fill a model of another number of classes with random dense layers, and only warn.
    """
    own: Any = model
    if (plan.base or "").startswith(TRANSFORMERS):
        entries = {"architectures": [type(model).__name__], "dtype": str(own.dtype).removeprefix("torch.")}
        config = own.config.to_dict() | entries | {"quantization_config": quantization_entry(plan, optimize=optimize)}
        return json.loads(json.dumps(config))
    data = data_config(model, plan.base_args)
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


def check_config(config: Mapping[str, Any], plan: Plan, folder: Path) -> None:
    """Refuse a ``config.json`` that differs from the header's plan: timm and transformers build from the one, ``load`` from the other."""
    file = folder / "config.json"
    if is_of_transformers(config):
        where, entry = "", config["quantization_config"]
        found = transformers_arguments(config) | {"plan": entry.get("plan")}
        expected = {**plan.base_args, "plan": quantization_entry(plan)["plan"]}
        if base_of(config, file) != plan.base:
            raise CheckpointError(f"{file} names the class {config['architectures'][0]!s:.60}, and model.safetensors has {plan.base}")
    else:
        where, entry, found = " in model_args", config, config["model_args"]
        expected = {"base": plan.base, "base_args": dict(plan.base_args), "plan": plan.to_json()}
        if config["architecture"] != ENTRY_POINT:
            raise CheckpointError(f"{file} names architecture '{config['architecture']}', expected '{ENTRY_POINT}'")
    differing = [name for name, value in json.loads(json.dumps(expected)).items() if found.get(name) != value]
    if differing:
        raise CheckpointError(f"{file} does not match model.safetensors: {', '.join(differing[:3])} differ; one was changed")
    added = ", ".join(sorted(found.keys() - expected.keys())[:3])
    if added:
        raise CheckpointError(
            f"{file} sets {added}{where}, which would change the model; remove them, and give such arguments on opening it"
        )
    if not isinstance(entry.get("optimize", False), bool):
        raise CheckpointError(f"{file}: 'optimize' must be true or false")


def check_description(config: Mapping[str, Any], model: nn.Module, plan: Plan, folder: Path) -> None:
    """Refuse a ``config.json`` with data that timm cannot use, or with sizes other than those of the model that the header describes."""
    if is_of_transformers(config):
        return
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


def check_data(data: Mapping[str, Any], where: str) -> None:
    """Refuse a ``pretrained_cfg`` with entries that timm reads and cannot use; None stands for no entry."""
    for names, is_right, wanted in KINDS:
        for name in names:
            value = data.get(name)
            if value is not None and not is_right(value):
                raise CheckpointError(f"{where}.{name} must be {wanted}, got {value!r:.60}")


def is_converted_config(config: Mapping[str, Any]) -> bool:
    """Whether a ``config.json`` is that of a converted model."""
    return is_of_transformers(config) or config.get("architecture") == ENTRY_POINT


def wants_optimize(config: Mapping[str, Any]) -> bool:
    """Whether a ``config.json`` asks ``load`` for fused modules."""
    return (config["quantization_config"] if is_of_transformers(config) else config).get("optimize") is True


def describe(model: nn.Module, config: Mapping[str, Any], folder: Path) -> None:
    """Tell a loaded model what its folder says of images and classes."""
    if is_of_transformers(config):
        describe_labels(model, config)
        with suppress(FileNotFoundError):
            describe_images(model, read_json(folder / PROCESSOR))
    else:
        describe_data(model, config["pretrained_cfg"])


def describe_data(model: nn.Module, pretrained_cfg: Mapping[str, Any]) -> None:
    """Tell a timm model what its weights were trained on, as ``timm.data`` reads it: mean, std, crop, labels, ...

    What the architecture says of published weights (source, tag, licence) is taken away.
    """
    if not hasattr(model, "pretrained_cfg"):
        return
    known = {each.name for each in fields(PretrainedCfg)} - WEIGHT_SOURCES - {"architecture"}
    found = {name: tuple(value) if isinstance(value, list) else value for name, value in pretrained_cfg.items() if name in known}
    _replace_data(model, _without(model.pretrained_cfg, WEIGHT_SOURCES | CLAIMS | LABELS) | found)


def vouch_for_weights(model: nn.Module) -> None:
    """Note on a timm model that it has the weights that its ``pretrained_cfg`` names, so that a folder may say so."""
    _replace_data(model, _without(model.pretrained_cfg, WEIGHT_SOURCES))


def _replace_data(model: Any, data: dict[str, Any]) -> None:
    model.pretrained_cfg = model.default_cfg = data  # timm's models keep plain dicts under both names


def data_config(model: nn.Module, base_args: Mapping[str, Any]) -> dict[str, Any]:
    """The ``pretrained_cfg`` of a folder with the model's own weights: what its own says that holds there, and its sizes as they are.

    One that names a source is its architecture's, and the same whether the weights were taken from there or not; its tag and licence
    are left out.
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
