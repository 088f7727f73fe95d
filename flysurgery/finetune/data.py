"""Images to train on, and the held-out ones that belong to them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from flysurgery.errors import DataError
from flysurgery.evaluation import Fractals, ImageData, Preparation, load_data, preparation
from flysurgery.finetune.batches import Batches, GeneratedBatches, LoadedBatches, Place
from flysurgery.finetune.pictures import DigitPictures, dataset_classes, open_dataset
from flysurgery.finetune.settings import Settings

FOLDERS = ("val", "validation", "eval", "test")
"""Names under which a folder of images keeps the held-out ones beside ``train``."""

DIGIT_CROP, PHOTO_CROP = 0.7, 0.08
"""Least share of an image that a random crop keeps: a digit must stay the same digit; for photographs timm's default."""

IMAGES_A_CLASS = 256
"""Generated images of each class in an epoch, unless the settings say otherwise."""


@dataclass(frozen=True)
class TrainingData:
    """A data set by name; ``open`` gives this process its share of the batches, once it is known where it runs."""

    name: str
    num_classes: int
    samples: int
    open: Callable[[Place], Batches]


def training_data(name: str | Path, model: nn.Module, settings: Settings, *, root: Path | None = None) -> TrainingData:
    """The training images ``name``, prepared for ``model``.

    "digits": two thirds of scikit-learn's. "fractals": generated on the device as they are needed, never the same twice, in as
    many classes as the model has. A folder that holds one folder of images for each class, itself or its ``train``. A name with a
    slash and no such folder is one of timm's data sets under ``root``, such as ``torch/cifar10`` or ``hfds/NAME``, split "train". In
    place of an image that cannot be read the next one is taken, with a warning that names it, up to ten times in a row.

    Raises:
        DataError: the data are not there, do not fit the model, or are fewer than one batch.
    """
    wanted = preparation(model)
    classes = getattr(model, "num_classes", None)
    if str(name) == "fractals":
        return _fractals(wanted, classes, settings)
    if str(name) == "digits":
        dataset, found, least, flip = DigitPictures(wanted.channels), 10, DIGIT_CROP, 0.0
    else:
        dataset = open_dataset(str(name), root, "train", wanted.channels, training=True)
        found, least, flip = dataset_classes(dataset), PHOTO_CROP, 0.5
    if isinstance(classes, int) and found is not None and classes != found:
        raise DataError(f"{name} has {found} classes and the model tells {classes} apart; they must be the same")
    samples = len(dataset)
    if samples < settings.batch_size:
        raise DataError(f"{name} has {samples} images for training, fewer than one batch of {settings.batch_size}; lower the batch size")
    crop = settings.crop if settings.crop is not None else least
    flip = settings.flip if settings.flip is not None else flip

    def open_(place: Place) -> Batches:
        return LoadedBatches(dataset, wanted, settings, place, crop=crop, flip=flip, in_memory=str(name) == "digits")

    return TrainingData(str(name), found or classes or 0, samples, open_)


def held_out_data(name: str | Path, model: nn.Module, *, root: Path | None = None) -> ImageData | None:
    """The held-out images that go with the training images ``name``; None where a folder has none.

    Raises:
        DataError: they are there and do not fit the model.
    """
    if str(name) in ("digits", "fractals"):
        return load_data(name, model)
    folder = Path(name)
    if folder.is_dir():
        found = next((folder / each for each in FOLDERS if (folder / each).is_dir()), None)
        return None if found is None else load_data(found, model)
    return _held_out_split(str(name), root, preparation(model), model)


def _held_out_split(name: str, root: Path | None, wanted: Preparation, model: nn.Module) -> ImageData:
    from timm.data.transforms_factory import create_transform

    dataset: Any = open_dataset(name, root, "validation", wanted.channels, training=False)
    dataset.transform = create_transform(**{**wanted.config, "mean": wanted.mean, "std": wanted.std}, is_training=False)
    classes = dataset_classes(dataset) or getattr(model, "num_classes", 0)
    return ImageData(f"{name} validation", dataset, len(dataset), classes)


def _fractals(wanted: Preparation, classes: object, settings: Settings) -> TrainingData:
    if not isinstance(classes, int) or classes < 1:
        raise DataError("fractals have as many classes as the model, and this one does not say how many it has")
    samples = settings.images_per_epoch or IMAGES_A_CLASS * classes

    def open_(place: Place) -> Batches:
        size = (wanted.height, wanted.width)
        images = Fractals("train", classes, size, mean=wanted.mean, std=wanted.std, device=place.device, seed=settings.seed)
        return GeneratedBatches(images, samples, settings, place)

    return TrainingData("fractals", classes, samples, open_)
