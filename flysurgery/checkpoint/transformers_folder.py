"""What folders of models of transformers say of the base, the classes and the images, and how a dense one is written."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from flysurgery.checkpoint.base import TRANSFORMERS
from flysurgery.checkpoint.folder import write_json
from flysurgery.errors import CheckpointError
from flysurgery.surgery import QUANT_METHOD

PROCESSOR = "preprocessor_config.json"
"""The file with the settings of an image processor of transformers."""


def is_of_transformers(config: Mapping[str, Any]) -> bool:
    """Whether a ``config.json`` is that of a converted model of transformers."""
    entry = config.get("quantization_config")
    return isinstance(entry, dict) and entry.get("quant_method") == QUANT_METHOD


def base_of(config: Mapping[str, Any], file: Path) -> str:
    """The base that ``architectures`` names, which must be one class (CheckpointError)."""
    architectures = config.get("architectures")
    if not (isinstance(architectures, list) and len(architectures) == 1 and isinstance(architectures[0], str)):
        raise CheckpointError(f"{file}: 'architectures' must be a list of one class of transformers, got {architectures!r:.60}")
    return TRANSFORMERS + architectures[0]


def describe_labels(model: nn.Module, config: Mapping[str, Any]) -> None:
    """Give the model's configuration the names of the classes, which do not change what is built."""
    labels = config.get("id2label")
    own: Any = model.config
    if isinstance(labels, dict) and len(labels) == len(own.id2label or {}):
        own.id2label = {int(number): str(label) for number, label in labels.items() if str(number).isdecimal()}
        own.label2id = {label: number for number, label in own.id2label.items()}


def describe_images(model: nn.Module, processor: Mapping[str, Any]) -> None:
    """Note on a model how its images are scaled and normalized, by the settings of an image processor, if it has such settings.

    The mean and the standard deviation that are noted are those of pixels from 0 to 1, also where the processor scales otherwise.
    Settings that are no numbers are refused (CheckpointError).
    """
    if not isinstance(processor, Mapping):
        raise CheckpointError(f"{PROCESSOR} must hold a JSON object, got {processor!r:.60}; correct it, or remove the file")
    found = {name: processor[f"image_{name}"] for name in ("mean", "std") if processor.get(f"image_{name}") is not None}
    if processor.get("do_normalize") is False:
        found = {"mean": [0.0], "std": [1.0]}
    for name, values in found.items():
        right = isinstance(values, list) and values and all(type(value) in (int, float) and math.isfinite(value) for value in values)
        if not right or (name == "std" and min(values) <= 0):
            raise CheckpointError(
                f"{PROCESSOR}: image_{name} must be a list of numbers, got {values!r:.60}; correct it, or remove the file"
            )
    scale = _scale_of(processor)
    if scale != 1:
        found = {name: [value / scale for value in found.get(name, [float(name == "std")])] for name in ("mean", "std")}
    if found:
        own: Any = model
        own.pretrained_cfg, own.image_processor = found, dict(processor)


def _scale_of(processor: Mapping[str, Any]) -> float:
    """What a processor makes of a white pixel before it normalizes: 1, or 255 where it does not rescale."""
    factor = 1 if processor.get("do_rescale") is False else processor.get("rescale_factor")
    if factor is None:
        return 1.0
    if type(factor) not in (int, float) or not 0 < factor < math.inf:
        raise CheckpointError(f"{PROCESSOR}: rescale_factor must be a positive number, got {factor!r:.60}; correct it, or remove the file")
    white = 255 * factor
    return 1.0 if math.isclose(white, 1, rel_tol=1e-6) else white


def processor_of(model: nn.Module) -> Mapping[str, Any]:
    """The settings that ``describe_images`` noted; empty where there are none."""
    return getattr(model, "image_processor", {})


def write_by_transformers(model: Any, folder: Path) -> None:
    """Write a dense model as ``save_pretrained`` does, with the settings of its image processor."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        model.save_pretrained(folder)
    finally:
        if shown:
            logging.enable_progress_bar()
    if processor_of(model):
        write_json(folder / PROCESSOR, processor_of(model))
