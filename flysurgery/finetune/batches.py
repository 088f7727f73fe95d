"""Batches of images to train on: read by timm's loader, made from pictures in memory, or computed."""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from timm.data.loader import create_loader
from timm.data.transforms_factory import create_transform
from timm.utils.random import random_seed
from torch import Tensor

from flysurgery.calibration import Pictures
from flysurgery.errors import DataError, OptionError
from flysurgery.evaluation import Fractals, Preparation
from flysurgery.evaluation.data import MAX_WORKERS, without_traceback
from flysurgery.fidelity import VIEWS, made_ahead, views
from flysurgery.finetune.settings import BATCH, Settings

if TYPE_CHECKING:
    from accelerate import Accelerator


@dataclass(frozen=True)
class Batches:
    """``count`` batches of ``size`` images an epoch.

    ``epoch(number, start)`` gives pairs of normalized images and their classes, on the device of this process, from the batch numbered
    ``start`` on.
    """

    size: int
    count: int
    epoch: Callable[[int, int], Iterator[tuple[Tensor, Tensor]]]


def seed_everything(*numbers: int) -> None:
    """Start every generator of this process from ``numbers``.

    It is called before each update with its number, so that what is drawn depends on the seed, the update and the process, and
    not on what ran before: a resumed run draws what it would have drawn.
    """
    random_seed(int(np.random.SeedSequence(numbers).generate_state(1)[0]))


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
    dataset: Any, wanted: Preparation, settings: Settings, here: "Accelerator", *, crop: float, flip: float, jitter: float, in_memory: bool
) -> Batches:
    """Read pictures by timm's loader, with its random crops, policies and erasing, in processes of their own where that pays.

    An epoch's order and distortions follow from the seed and the epoch's number. Batches before ``start`` are read and dropped, so
    that those after it are the same as in a whole epoch.
    """
    workers = settings.workers
    if workers is None:
        workers = 0 if in_memory else min(MAX_WORKERS, (os.cpu_count() or 1) // here.num_processes)
    size = batch_size_of(settings, len(dataset), here.num_processes)
    loader: Any = create_loader(
        dataset,
        input_size=wanted.shape,
        batch_size=size,
        is_training=True,
        scale=(crop if settings.crop is None else settings.crop, 1.0),
        ratio=(0.9, 1.1) if in_memory else None,
        hflip=flip if settings.flip is None else settings.flip,
        color_jitter=jitter if wanted.channels == 3 else 0.0,
        auto_augment=policy_of(settings),
        re_prob=settings.erase,
        interpolation=str(wanted.config["interpolation"]),
        mean=wanted.mean,
        std=wanted.std,
        num_workers=workers,
        distributed=here.num_processes > 1,
        use_prefetcher=here.device.type == "cuda",
        pin_memory=here.device.type == "cuda",
        device=here.device,
        persistent_workers=False,
    )

    def epoch(number: int, start: int) -> Iterator[tuple[Tensor, Tensor]]:
        sampler: Any = getattr(loader, "sampler", None)
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(number)
        seed_everything(settings.seed, number, here.process_index)
        batches = iter(loader)
        for index in range(len(loader)):
            # pictures that are read in this process draw from its generators, so these start anew with each batch
            seed_everything(settings.seed, number, here.process_index, index)
            try:
                images, classes = next(batches)
            except StopIteration:
                return
            except DataError as error:
                raise without_traceback(error) from error
            if index >= start:
                yield images.to(here.device), classes.to(here.device)

    return Batches(size, len(loader), epoch)


def generated_batches(images: Fractals, samples: int, settings: Settings, here: "Accelerator") -> Batches:
    """Make fractals on the device. Every image is new: its number goes on through epochs and processes."""
    size = batch_size_of(settings, samples, here.num_processes)
    count = samples // (size * here.num_processes)
    if not count:
        raise DataError(
            f"an epoch of {samples} generated images is less than one batch of {size} for each of "
            f"{here.num_processes} processes; ask for more images an epoch"
        )

    def epoch(number: int, start: int) -> Iterator[tuple[Tensor, Tensor]]:
        for index in range(start, count):
            batch = (number * count + index) * here.num_processes + here.process_index
            yield images.batch(range(batch * size, (batch + 1) * size))

    return Batches(size, count, lambda number, start: made_ahead(epoch(number, start), here.device))


def viewed_batches(pictures: Pictures, settings: Settings, here: "Accelerator") -> Batches:
    """Make random views of pictures in memory, on the device; those of an epoch follow from the seed, its number and the process.

    An update has as many of them as one of a reconstruction, unless the settings say otherwise.
    """
    size = batch_size_of(settings, len(pictures), here.num_processes, VIEWS.get(here.device.type, VIEWS["cpu"]))
    count, pictures = len(pictures) // (size * here.num_processes), pictures.to(here.device)

    def epoch(number: int, start: int) -> Iterator[tuple[Tensor, Tensor]]:
        order = torch.from_numpy(np.random.default_rng((settings.seed, number)).permutation(len(pictures))).to(here.device)
        none = torch.zeros(size, dtype=torch.long, device=here.device)
        for index in range(start, count):
            seed_everything(settings.seed, number, here.process_index, index)
            batch = index * here.num_processes + here.process_index
            yield views(pictures, order[batch * size : (batch + 1) * size]), none

    return Batches(size, count, lambda number, start: made_ahead(epoch(number, start), here.device))
