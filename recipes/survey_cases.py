"""The models of the survey: one of every timm architecture file, vit-pytorch's classes, and transformers' classes for vision tasks."""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import timm
import torch
from timm.models import is_model_in_modules
from torch import nn


@dataclass(frozen=True)
class Case:
    """A model to survey: how it is built, what goes around it, and its input, None where the walk finds one."""

    family: str
    name: str
    base: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    example: Callable[[], Any] | None = None
    wrap: Callable[[nn.Module], nn.Module] | None = None


def _listed(library: str) -> list[list[str]]:
    """The words of each line of a library's list of models."""
    lines = Path(__file__).with_name(f"survey_{library}.txt").read_text(encoding="utf-8").splitlines()
    return [line.split() for line in lines]


def timm_cases() -> list[Case]:
    """The models that survey_timm.txt names of each file, at their default arguments; of a file without any its first one.

    Of a file with several sizes it names a small model, and of one with several kinds of blocks one of each.
    """
    chosen = [name for (name,) in _listed("timm")]
    found = {file: [name for name in chosen if is_model_in_modules(name, {file})] for file in timm.list_modules()}
    found = {file: names or timm.list_models(module=file)[:1] for file, names in found.items()}
    # The door for converted folders is no model of timm.
    return [Case(file, name, name) for file, names in found.items() for name in names if name != "flysurgery_structured"]


SIZES = {"image_size": 64, "patch_size": 8, "num_classes": 50, "dim": 128, "depth": 2, "heads": 4, "mlp_dim": 256, "dim_head": 32}
SIZES |= {"image_patch_size": 8, "frames": 4, "frame_patch_size": 2}
"""What constructors of vit-pytorch get, as far as they have it: narrow and shallow, since variants differ in structure and not in size."""

EXAMPLES: Mapping[str, Callable[[], Any]] = {
    "na_vit": lambda: ([torch.zeros(3, 64, 64), torch.zeros(3, 32, 64)],),
    "na_vit_nested_tensor": lambda: ([torch.zeros(3, 64, 64), torch.zeros(3, 32, 64)],),
    "na_vit_nested_tensor_3d": lambda: ([torch.zeros(3, 4, 64, 64), torch.zeros(3, 4, 32, 64)],),
    "cct_3d": lambda: torch.zeros(2, 3, 4, 64, 64),
}
"""Inputs of the modules whose models take several sizes at once, or none that the walk finds."""

WRAPPERS: Sequence[tuple[str, str, str, str, Mapping[str, Any]]] = (
    ("vit", "MAE", "mae", "encoder", {"decoder_dim": 64, "decoder_heads": 4}),
    ("vit", "SimMIM", "simmim", "encoder", {}),
    ("mp3", "MP3", "mp3", "vit", {"masking_ratio": 0.75}),
    ("vit", "Recorder", "recorder", "vit", {}),
    ("vit", "Extractor", "extractor", "vit", {}),
    ("learnable_memory_vit", "Adapter", "learnable_memory_vit", "vit", {}),
)
"""Classes around a ViT, which train it or look into it: the ViT's module, the class, its module, what it calls the ViT, and arguments."""


def vit_pytorch_cases() -> list[Case]:
    """The classes in survey_vit_pytorch.txt, with their own arguments beside the common sizes, and a ViT within the classes around it."""
    cases = [_vit_pytorch_case(place, dict(each.split("=", 1) for each in own)) for place, *own in _listed("vit_pytorch")]
    for module, name, own, called, arguments in WRAPPERS:
        wrapper = getattr(importlib.import_module(f"vit_pytorch.{own}"), name)
        wrap = lambda vit, wrapper=wrapper, called=called, arguments=arguments: wrapper(**{called: vit}, **arguments)  # noqa: E731
        inner = _vit_pytorch_case(f"{module}:ViT", {})
        cases.append(replace(inner, name=f"{name} of {inner.name}", example=lambda: torch.zeros(2, 3, 64, 64), wrap=wrap))
    return cases


def _vit_pytorch_case(place: str, own: Mapping[str, str]) -> Case:
    """A class with its own arguments, as texts, and the common sizes that its constructor or that of a base has."""
    module, _, name = place.partition(":")
    known = {each for base in getattr(importlib.import_module(f"vit_pytorch.{module}"), name).__mro__ for each in _parameters(base)}
    arguments = {key: value for key, value in SIZES.items() if key in known}
    arguments |= {key: ast.literal_eval(value) for key, value in own.items()}
    variant = f" {arguments['variant']}" if "variant" in own else ""
    return Case(module, f"{place}{variant}", f"vit_pytorch.{place}", arguments, EXAMPLES.get(module))


def _parameters(kind: type) -> Iterable[str]:
    is_own = kind.__module__.startswith("vit_pytorch")
    return inspect.signature(kind).parameters if is_own else ()


TASKS = ("IMAGE_CLASSIFICATION", "VIDEO_CLASSIFICATION", "OBJECT_DETECTION", "SEGMENTATION", "DEPTH", "IMAGE_TO_IMAGE", "MASKED_IMAGE")
TASKS += ("BACKBONE", "ZERO_SHOT_IMAGE", "KEYPOINT", "MASK_GENERATION")
"""What names of transformers' tables of vision models hold."""

SHALLOW = frozenset({"num_hidden_layers", "num_layers", "encoder_layers", "decoder_layers", "n_layer", "num_decoder_layers"})
"""Entries of configurations that count layers, of which two are enough to see each kind."""

READ_BY_NUMBER = ("Backbone", "Depth", "Segment", "Dpt", "DPT")
"""Parts of the names of classes that read hidden states by numbers of the configuration."""


def transformers_cases() -> list[Case]:
    """Every model class of transformers' tables of vision tasks, with the sizes of its default configuration and few layers."""
    from transformers.models.auto import modeling_auto

    names = [name for name in dir(modeling_auto) if name.endswith("_MAPPING_NAMES") and any(task in name for task in TASKS)]
    tables = [getattr(modeling_auto, name) for name in names]
    found: dict[str, str] = {}
    for table in tables:
        for family, names in table.items():
            for name in [names] if isinstance(names, str) else names:
                found.setdefault(name, family)
    return [Case(family, name, f"transformers:{name}", _shallow_arguments(name)) for name, family in sorted(found.items())]


def _shallow_arguments(name: str) -> dict[str, Any]:
    """The entries of the default configuration that make the model shallow; none where its hidden states are read by their numbers."""
    import transformers

    config = getattr(transformers, name).config_class
    if config is None or any(part in name for part in READ_BY_NUMBER):
        return {}
    return _shallow(config().to_dict())


def _shallow(entries: Mapping[str, Any]) -> dict[str, Any]:
    """The entries that count layers, at most two each, also in the configurations of towers."""
    towers = {key: _shallow(value) for key, value in entries.items() if isinstance(value, dict) and "model_type" in value}
    counts = {key: min(2, value) for key, value in entries.items() if key in SHALLOW and isinstance(value, int)}
    return counts | {key: {"model_type": entries[key]["model_type"]} | value for key, value in towers.items() if value}
