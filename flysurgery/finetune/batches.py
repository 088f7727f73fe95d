"""The batches of one process, epoch by epoch, the same whenever an epoch is begun anew."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from flysurgery.errors import DataError
from flysurgery.evaluation import Fractals, Preparation
from flysurgery.finetune.devices import seed_everything
from flysurgery.finetune.settings import Settings

MAX_WORKERS = 8


@dataclass(frozen=True)
class Place:
    """The device of a process, its number, and how many there are."""

    device: torch.device
    process: int
    processes: int


class Batches(Protocol):
    """``len`` batches an epoch; ``epoch`` gives them from the one numbered ``start`` on, on the process's device."""

    def __len__(self) -> int: ...

    def epoch(self, number: int, start: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Pairs of normalized images and their classes."""
        ...


class LoadedBatches:
    """Pictures by timm's loader: its random crops, policies and erasing, in processes of their own where that pays.

    An epoch's order and distortions follow from the seed and the epoch's number. Batches before ``start`` are read and dropped, so
    that those after it are what they would have been.
    """

    def __init__(
        self, dataset: Any, wanted: Preparation, settings: Settings, place: Place, *, crop: float, flip: float, in_memory: bool
    ) -> None:
        from timm.data.loader import create_loader

        workers = settings.workers
        if workers is None:
            workers = 0 if in_memory else min(MAX_WORKERS, (os.cpu_count() or 1) // max(1, place.processes))
        self._settings, self._place = settings, place
        self._loader: Any = create_loader(
            dataset,
            input_size=(wanted.channels, wanted.height, wanted.width),
            batch_size=settings.batch_size,
            is_training=True,
            scale=(crop, 1.0),
            ratio=(0.9, 1.1) if in_memory else None,
            hflip=flip,
            color_jitter=0.4 if wanted.channels == 3 and not in_memory else 0.0,
            auto_augment=settings.augment,
            re_prob=settings.erase,
            interpolation=str(wanted.config["interpolation"]),
            mean=wanted.mean,
            std=wanted.std,
            num_workers=workers,
            distributed=place.processes > 1,
            use_prefetcher=place.device.type == "cuda",
            pin_memory=place.device.type == "cuda",
            device=place.device,
            persistent_workers=False,
        )
        self._length = len(self._loader)

    def __len__(self) -> int:
        return self._length

    def epoch(self, number: int, start: int) -> Iterator[tuple[Tensor, Tensor]]:
        sampler: Any = getattr(self._loader, "sampler", None)
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(number)
        seed_everything(self._settings.seed, number, self._place.process)
        batches = iter(self._loader)
        for index in range(len(self)):
            # Pictures that are read in this process draw from its generators, so these start anew with each batch.
            seed_everything(self._settings.seed, number, self._place.process, index)
            try:
                images, classes = next(batches)
            except StopIteration:
                return
            except DataError as error:
                # A reading process sends its error inside a traceback, whose last line is the sentence.
                raise DataError(str(error).strip().splitlines()[-1].rpartition("DataError: ")[2]) from error
            if index >= start:
                yield images.to(self._place.device), classes.to(self._place.device)


class GeneratedBatches:
    """Fractals that are made on the device. Every image is new: its number counts on through epochs and processes."""

    def __init__(self, images: Fractals, samples: int, settings: Settings, place: Place) -> None:
        self._images, self._size, self._place = images, settings.batch_size, place
        self._length = samples // (settings.batch_size * place.processes)
        if not self._length:
            raise DataError(
                f"an epoch of {samples} generated images is less than one batch of {settings.batch_size} for each of "
                f"{place.processes} processes; ask for more images an epoch"
            )

    def __len__(self) -> int:
        return self._length

    def epoch(self, number: int, start: int) -> Iterator[tuple[Tensor, Tensor]]:
        for index in range(start, len(self)):
            batch = (number * len(self) + index) * self._place.processes + self._place.process
            yield self._images.batch(range(batch * self._size, (batch + 1) * self._size))
