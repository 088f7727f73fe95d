"""Images with their classes, prepared for one model."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from timm.data.config import resolve_data_config
from torch import Tensor, nn
from torch.utils.data import Dataset

from flysurgery.errors import DataError, WalkError
from flysurgery.evaluation.digits import digits
from flysurgery.evaluation.fractals import Fractals
from flysurgery.walker import example_input

SMALL = 512
"""Below this many images a process of its own costs more than it reads."""

MAX_WORKERS = 8

FRACTALS_A_CLASS = 50
"""Held-out fractals of each class."""


@dataclass(frozen=True)
class ImageData:
    """``dataset[i]`` is an image of shape (channels, height, width), as the model takes it, and its class."""

    name: str
    dataset: Dataset[Any]
    samples: int
    num_classes: int

    @property
    def workers(self) -> int:
        """How many processes to read images with; none where they lie in memory or are few."""
        return 0 if self.name in ("digits", "fractals") or self.samples < SMALL else min(MAX_WORKERS, os.cpu_count() or 1)


@dataclass(frozen=True)
class Preparation:
    """What a model wants of its images: their size, and the mean and standard deviation to normalize each channel by."""

    channels: int
    height: int
    width: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    config: Mapping[str, Any]


def load_data(name: str | Path, model: nn.Module) -> ImageData:
    """The data set ``name``, prepared for ``model``, whose weights may live on meta.

    "digits" is the held-out third of scikit-learn's digits: 599 handwritten digits of 8x8 pixels, resized to the
    model's input. "fractals" is computed where the model is, in as many classes as it has: 50 held-out images of each.
    Anything else is a folder with one folder of images for each class, prepared as timm does for the model's
    ``pretrained_cfg``; the classes are numbered in the order of their names.

    Raises:
        DataError: the data are not there or cannot be read, or have another number of classes than the model.
    """
    wanted = preparation(model)
    if str(name) == "digits":
        dataset = digits("held-out", (wanted.height, wanted.width), mean=wanted.mean, std=wanted.std)
        data = ImageData("digits", dataset, len(dataset), 10)
    elif str(name) == "fractals":
        dataset = fractals("held-out", model, wanted)
        return ImageData("fractals", dataset, len(dataset), dataset.classes)
    else:
        data = _folder(Path(name), wanted)
    classes = getattr(model, "num_classes", None)
    if isinstance(classes, int) and classes != data.num_classes:
        raise DataError(f"{name} has {data.num_classes} classes and the model tells {classes} apart; they must be the same")
    return data


def preparation(model: nn.Module) -> Preparation:
    """The input size that the model takes, and the normalization its ``pretrained_cfg`` names, or else timm's default.

    Raises:
        DataError: the model takes something else than images.
    """
    try:
        example = example_input(model)
    except WalkError as error:
        raise DataError(f"it is not known what images the model takes: {error}") from error
    if not isinstance(example, Tensor):
        raise DataError("expected a model of images in one tensor, got one that takes a list of images")
    shape = tuple(example.shape)
    if len(shape) != 4 or shape[1] not in (1, 3):
        raise DataError(f"expected a model of images with 1 or 3 channels, got one that takes inputs of shape {shape}")
    _, channels, height, width = shape
    known = getattr(model, "pretrained_cfg", None) or {}
    config = resolve_data_config({}, pretrained_cfg={**known, "input_size": (channels, height, width)})
    return Preparation(channels, height, width, _per_channel(config["mean"], channels), _per_channel(config["std"], channels), config)


def _per_channel(values: Sequence[float], channels: int) -> tuple[float, ...]:
    """One value a channel; a single channel gets the mean of all."""
    return tuple(values) if len(values) == channels else (sum(values) / len(values),) * channels


def fractals(part: Literal["train", "held-out"], model: nn.Module, wanted: Preparation) -> Fractals:
    """Fractals in as many classes as ``model`` has, made where it is; of the held-out ones a fixed number of each class.

    Raises:
        DataError: the model does not say how many classes it has.
    """
    classes = getattr(model, "num_classes", None)
    if not isinstance(classes, int):
        raise DataError("fractals have as many classes as the model, and this one does not say how many it has")
    device = next(model.parameters()).device
    place = "cpu" if device.type == "meta" else device
    size = (wanted.height, wanted.width)
    return Fractals(part, classes, size, mean=wanted.mean, std=wanted.std, device=place, samples=FRACTALS_A_CLASS * classes)


def _folder(folder: Path, wanted: Preparation) -> ImageData:
    if not folder.is_dir():
        raise DataError(
            f"there is no data set '{folder}': expected 'digits', 'fractals' or a folder with one folder of images for each class"
        )
    from torchvision.datasets import ImageFolder

    try:
        dataset = ImageFolder(folder, transform=transform_of(wanted), loader=lambda path: read_image(path, wanted.channels))
    except OSError as error:  # torchvision's word for no folders, or one without images
        raise DataError(f"{folder} is no image folder, with one folder of images for each class: {_first_line(error)}") from error
    return ImageData(str(folder), dataset, len(dataset), len(dataset.classes))


def transform_of(wanted: Preparation) -> Callable[[Any], Any]:
    """What timm does to an image before it is shown to the model, without augmentation."""
    from timm.data.transforms_factory import create_transform

    options: Any = {**wanted.config, "mean": wanted.mean, "std": wanted.std}
    transform: Any = create_transform(**options, is_training=False)
    return transform


def read_image(path: str, channels: int) -> Any:
    """The image in a file, grey or in colours. Raises ``DataError`` for what is no image, or is cut short."""
    from PIL import Image

    try:
        with Image.open(path) as image:
            return image.convert("L" if channels == 1 else "RGB")
    except OSError as error:  # PIL's errors for what is no image, or is cut short, are of this kind
        raise DataError(f"{path} cannot be read as an image: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0].rstrip(".")
