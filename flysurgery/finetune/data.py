"""Images to train on, as batches, and the held-out ones that belong to them."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from timm.data.transforms_factory import create_transform
from torch import Tensor, nn

from flysurgery.calibration import Pictures
from flysurgery.errors import DataError, OptionError
from flysurgery.evaluation import Fractals, ImageData, Preparation, digits, load_data, preparation
from flysurgery.evaluation.data import MADE, MAX_WORKERS, image_files, sentence_of
from flysurgery.fidelity import VIEWS, views
from flysurgery.finetune.devices import seed_everything
from flysurgery.finetune.pictures import (
    MOST_BYTES,
    class_folders,
    classes_in,
    digit_pictures,
    held_out_part,
    is_labelled,
    labelled_pictures,
    named_pictures,
    read_pictures,
    unlabelled_files,
    unlabelled_pictures,
)
from flysurgery.finetune.settings import BATCH, Settings
from flysurgery.surgery import classes_of


@dataclass(frozen=True)
class Process:
    """One of the processes that train together: its device, its number, and how many they are."""

    device: torch.device
    process: int
    processes: int


@dataclass(frozen=True)
class Batches:
    """``count`` batches of ``size`` images an epoch.

    ``epoch(number, start)`` gives pairs of normalized images and their classes, on the device of this process, from the batch numbered
    ``start`` on.
    """

    size: int
    count: int
    epoch: Callable[[int, int], Iterator[tuple[Tensor, Tensor]]]


def check_augmentation(settings: Settings) -> None:
    """Check that timm knows the policy of augmentation, before anything is written."""
    if settings.augment is None:
        return
    try:
        create_transform(32, is_training=True, auto_augment=policy_of(settings))
    except (AssertionError, ValueError, KeyError, TypeError) as error:
        raise OptionError(f"timm has no policy of augmentation '{settings.augment}'; rand-m9-mstd0.5-inc1 is one") from error


def policy_of(settings: Settings) -> str | None:
    """The policy of augmentation, whose increasing magnitudes end at 9 of 10: at 10 timm posterizes to no bits, which Pillow 13 refuses."""
    policy = settings.augment
    return f"{policy}-mmax9" if policy is not None and "-inc1" in policy and "-mmax" not in policy else policy


def batch_size_of(settings: Settings, images: int, processes: int, usual: int = BATCH) -> int:
    """Give the batch that was asked for, or else the ``usual`` one, or as many images as there are for each process."""
    if settings.batch_size is not None:
        return settings.batch_size
    size = max(1, min(usual, images // processes))
    return size - size % 2 if settings.mixes and size > 1 else size


def loaded_batches(
    dataset: Any,
    wanted: Preparation,
    settings: Settings,
    here: Process,
    *,
    crop: float,
    flip: float,
    in_memory: bool = False,
    jitter: float = 0.4,
) -> Batches:
    """Read pictures by timm's loader, with its random crops, policies and erasing, in processes of their own where that pays.

    An epoch's order and distortions follow from the seed and the epoch's number. Batches before ``start`` are read and dropped, so
    that those after it are the same as in a whole epoch.
    """
    from timm.data.loader import create_loader

    workers = settings.workers
    if workers is None:
        workers = 0 if in_memory else min(MAX_WORKERS, (os.cpu_count() or 1) // max(1, here.processes))
    size = batch_size_of(settings, len(dataset), here.processes)
    loader: Any = create_loader(
        dataset,
        input_size=wanted.shape,
        batch_size=size,
        is_training=True,
        scale=(crop if settings.crop is None else settings.crop, 1.0),
        ratio=(0.9, 1.1) if in_memory else None,
        hflip=flip if settings.flip is None else settings.flip,
        color_jitter=jitter if wanted.channels == 3 and not in_memory else 0.0,
        auto_augment=policy_of(settings),
        re_prob=settings.erase,
        interpolation=str(wanted.config["interpolation"]),
        mean=wanted.mean,
        std=wanted.std,
        num_workers=workers,
        distributed=here.processes > 1,
        use_prefetcher=here.device.type == "cuda",
        pin_memory=here.device.type == "cuda",
        device=here.device,
        persistent_workers=False,
    )

    def epoch(number: int, start: int) -> Iterator[tuple[Tensor, Tensor]]:
        sampler: Any = getattr(loader, "sampler", None)
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(number)
        seed_everything(settings.seed, number, here.process)
        batches = iter(loader)
        for index in range(len(loader)):
            # pictures that are read in this process draw from its generators, so these start anew with each batch
            seed_everything(settings.seed, number, here.process, index)
            try:
                images, classes = next(batches)
            except StopIteration:
                return
            except DataError as error:
                raise sentence_of(error) from error
            if index >= start:
                yield images.to(here.device), classes.to(here.device)

    return Batches(size, len(loader), epoch)


def generated_batches(images: Fractals, samples: int, settings: Settings, here: Process) -> Batches:
    """Make fractals on the device. Every image is new: its number goes on through epochs and processes."""
    size = batch_size_of(settings, samples, here.processes)
    count = samples // (size * here.processes)
    if not count:
        raise DataError(
            f"an epoch of {samples} generated images is less than one batch of {size} for each of "
            f"{here.processes} processes; ask for more images an epoch"
        )

    def epoch(number: int, start: int) -> Iterator[tuple[Tensor, Tensor]]:
        for index in range(start, count):
            batch = (number * count + index) * here.processes + here.process
            yield images.batch(range(batch * size, (batch + 1) * size))

    return Batches(size, count, epoch)


def viewed_batches(pictures: Pictures, settings: Settings, here: Process) -> Batches:
    """Make random views of pictures in memory, on the device; what an epoch shows follows from the seed, its number and the process.

    An update has as many of them as one of a reconstruction, unless the settings say otherwise.
    """
    size = batch_size_of(settings, len(pictures), here.processes, VIEWS.get(here.device.type, VIEWS["cpu"]))
    count, pictures = len(pictures) // (size * here.processes), pictures.to(here.device)

    def epoch(number: int, start: int) -> Iterator[tuple[Tensor, Tensor]]:
        order = torch.from_numpy(np.random.default_rng((settings.seed, number)).permutation(len(pictures))).to(here.device)
        none = torch.zeros(size, dtype=torch.long, device=here.device)
        for index in range(start, count):
            seed_everything(settings.seed, number, here.process, index)
            batch = index * here.processes + here.process
            yield views(pictures, order[batch * size : (batch + 1) * size]), none

    return Batches(size, count, epoch)


_logger = logging.getLogger(__name__)

DIGIT_CROP, PHOTO_CROP, VIEW_CROP = 0.7, 0.08, 0.25
"""The least share of an image that a random crop keeps: a digit must stay the same digit; photographs with classes have timm's default."""

IMAGES_A_CLASS = 256
"""Generated images of each class in an epoch, unless the settings say otherwise."""


@dataclass(frozen=True)
class TrainingData:
    """A data set by name; ``open`` gives this process its share of the batches, once it is known where it runs.

    Where ``labelled`` is false, the classes that come with the images mean nothing.
    """

    name: str
    num_classes: int
    samples: int
    open: Callable[[Process], Batches]
    labelled: bool = True


def training_data(
    name: str | Path, model: nn.Module, settings: Settings, *, root: Path | None = None, teacher: bool = False, aside: bool = True
) -> TrainingData:
    """Find the training images ``name``, prepared for ``model``.

    "digits": two thirds of scikit-learn's. "fractals": generated on the device as they are needed, never the same twice, in as
    many classes as the model has. A folder that holds one folder of images for each class, itself or its ``train``. A name with a
    slash and no such folder is one of timm's data sets under ``root``, such as ``torch/cifar10`` or ``hfds/NAME``, split "train". In
    place of an image that cannot be read the next one is taken, with a warning that names it, up to ten times in a row.

    With a ``teacher`` no labels are needed: a model without a head takes none. Of a folder that does not have one folder for each class all
    images are taken, at any depth; ``aside`` holds out a tenth of them where the folder has no ``val``.

    Raises:
        DataError: the data are not there, do not fit the model, or are fewer than one batch.
    """
    wanted = preparation(model)
    classes = classes_of(model)
    if str(name) == "fractals":
        return _fractals(wanted, classes, settings)
    folder, is_digits = Path(name), str(name) == "digits"
    if classes == 0 and not teacher:
        raise DataError(f"the model has no head that {name} could train by its classes; give a teacher to imitate, --teacher MODEL")
    if not is_digits and folder.is_dir() and not is_labelled(folder, model):
        if teacher:
            if classes != 0 and class_folders(folder):
                _logger.warning("%s has not one folder of images for each class of the model, so it is used without labels", name)
            return _unlabelled(folder, wanted, settings, aside=aside)
        if not class_folders(folder):
            raise DataError(f"{name} holds no folder of images for each class; give a teacher that needs none, --teacher MODEL")
    if is_digits:
        dataset, least, likely = digit_pictures(wanted.channels), DIGIT_CROP, 0.0
    else:
        opened = (
            labelled_pictures(folder, wanted.channels) if folder.is_dir() else named_pictures(str(name), root, "train", wanted.channels)
        )
        dataset, least, likely = opened, PHOTO_CROP, 0.5
    found = classes_in(dataset)
    if classes and isinstance(classes, int) and found is not None and classes != found:
        raise DataError(f"{name} has {found} classes and the model tells {classes} apart; they must be the same")
    samples = len(dataset)
    _check_batch(name, samples, settings)

    def open_(here: Process) -> Batches:
        return loaded_batches(dataset, wanted, settings, here, crop=least, flip=likely, in_memory=is_digits)

    return TrainingData(str(name), found or classes or 0, samples, open_, labelled=classes != 0)


def held_out_data(name: str | Path, model: nn.Module, *, root: Path | None = None, teacher: bool = False) -> ImageData | None:
    """Find the held-out images that go with the training images ``name``; None where a folder has none.

    Images without labels need a ``teacher``, and their held-out images have no classes either.

    Raises:
        DataError: they are there and do not fit the model.
    """
    folder = Path(name)
    is_folder = str(name) not in MADE and folder.is_dir()
    apart = held_out_part(folder) if is_folder else None
    if not is_folder or apart is not None:
        return judging_data(apart or name, model, root=root, teacher=teacher)
    if not teacher or is_labelled(folder, model):
        return None
    return _without_classes(folder, unlabelled_files(folder)[1], preparation(model))


def judging_data(name: str | Path, model: nn.Module, *, root: Path | None = None, teacher: bool = False) -> ImageData:
    """Find all images of the data set ``name``, to measure with; with a ``teacher`` those of a folder need no labels.

    Raises:
        DataError: they are not there, or do not fit the model.
    """
    headless, folder, wanted = classes_of(model) == 0, Path(name), preparation(model)
    if str(name) == "digits" and headless:
        dataset = digits("held-out", wanted.size, mean=wanted.mean, std=wanted.std)
        return ImageData("digits", dataset, len(dataset), 0)
    if str(name) not in MADE and not folder.is_dir():
        named = named_pictures(str(name), root, "validation", wanted.channels)
        named.transform = wanted.transform()
        return ImageData(f"{name} validation", named, len(named), 0 if headless else classes_in(named) or classes_of(model) or 0)
    if str(name) not in MADE and teacher and not is_labelled(folder, model):
        return _without_classes(folder, image_files(folder), wanted)
    return load_data(name, model)


def _unlabelled(folder: Path, wanted: Preparation, settings: Settings, *, aside: bool) -> TrainingData:
    paths, _ = unlabelled_files(folder, aside=aside)
    _check_batch(folder, len(paths), settings)

    def open_(here: Process) -> Batches:
        on_cuda = here.device.type == "cuda"  # where pictures take at most a quarter of what is free
        room = min(MOST_BYTES, torch.cuda.mem_get_info(here.device)[0] // 4) if on_cuda else MOST_BYTES
        pictures = None if settings.distorts else read_pictures(paths, wanted, most=room)
        if pictures is not None:
            _check_batch(folder, len(pictures), settings)
            return viewed_batches(pictures, settings, here)
        dataset = unlabelled_pictures(paths, wanted.channels, skips=True)
        return loaded_batches(dataset, wanted, settings, here, crop=VIEW_CROP, flip=0.5, jitter=0.0)

    return TrainingData(str(folder), 0, len(paths), open_, labelled=False)


def _check_batch(name: str | Path, samples: int, settings: Settings) -> None:
    if settings.batch_size is not None and samples < settings.batch_size:
        raise DataError(f"{name} has {samples} images for training, fewer than one batch of {settings.batch_size}; lower the batch size")


def _without_classes(folder: Path, paths: list[Path], wanted: Preparation) -> ImageData:
    return ImageData(str(folder), unlabelled_pictures(paths, wanted.channels, wanted.transform()), len(paths), 0)


def _fractals(wanted: Preparation, classes: object, settings: Settings) -> TrainingData:
    if not isinstance(classes, int) or classes < 1:
        raise DataError("fractals have as many classes as the model, and this one does not say how many it has")
    samples = settings.images_per_epoch or IMAGES_A_CLASS * classes

    def open_(here: Process) -> Batches:
        images = Fractals("train", classes, wanted.size, mean=wanted.mean, std=wanted.std, device=here.device, seed=settings.seed)
        return generated_batches(images, samples, settings, here)

    return TrainingData("fractals", classes, samples, open_)
