"""Square crops of photographs: those that calibrate, arranged so that held-out ones show other photographs, and those that judge."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import cycle
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from timm.data.constants import IMAGENET_DEFAULT_MEAN as MEAN
from timm.data.constants import IMAGENET_DEFAULT_STD as STD
from torch import Tensor
from torchvision.datasets.folder import IMG_EXTENSIONS

from flysurgery.calibration import Pictures, Samples
from flysurgery.calibration.samples import HELD_OUT_EVERY
from flysurgery.errors import DataError
from flysurgery.evaluation.data import picture_of, read_image

SIDE = 224
LEAST_AREA = 0.25
"""Share of the largest square in a photograph that a crop has at least."""

JUDGE_EVERY = 4
ASIDE_EVERY = 12
"""Of the photographs to fit to, one in so many is shown by held-out samples alone, which are several crops of each."""


@dataclass(frozen=True)
class Photographs:
    """Files of photographs to fit to, and others to judge by."""

    fit: tuple[Path, ...]
    judge: tuple[Path, ...]


def photographs_in(folder: Path, most: int | None = None) -> Photographs:
    """Those in ``fit`` and ``judge`` of a folder, or of a flat one every fourth by name to judge; of each at most ``most``."""
    if (folder / "fit").is_dir() and (folder / "judge").is_dir():
        fit, judge = _pictures(folder / "fit"), _pictures(folder / "judge")
    else:
        every = _pictures(folder)
        judge = every[JUDGE_EVERY - 1 :: JUDGE_EVERY]
        fit = [file for file in every if file not in set(judge)]
    if len(fit) < 2 or not judge:
        raise DataError(f"{folder} holds {len(fit)} photographs to fit to and {len(judge)} to judge by; 2 and 1 are the least")
    return Photographs(_spread(fit, most), _spread(judge, most))


def _pictures(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise DataError(f"{folder} is no folder; make one with recipes/photographs.py")
    return sorted(file for file in folder.iterdir() if file.suffix.lower() in IMG_EXTENSIONS)


def _spread(files: Sequence[Path], most: int | None) -> tuple[Path, ...]:
    count = min(len(files), most or len(files))
    return tuple(files[index * len(files) // count] for index in range(count))


def order(count: int, photographs: int, seed: int) -> list[int]:
    """Which photograph each of ``count`` samples shows. Those that ``Samples`` holds out show a part of them, which no other shows."""
    shuffled = torch.randperm(photographs, generator=torch.Generator().manual_seed(seed)).tolist()
    aside = max(1, photographs // ASIDE_EVERY)
    held, fitted = cycle(shuffled[:aside]), cycle(shuffled[aside:])
    last = min(HELD_OUT_EVERY, count) - 1
    return [next(held if position % HELD_OUT_EVERY == last else fitted) for position in range(count)]


def crops(files: Sequence[Path], shown: Sequence[int], seed: int) -> Tensor:
    """One random square crop for each entry of ``shown``, of the file that it numbers; normalized, (crops, 3, 224, 224)."""
    chance = torch.rand(len(shown), 3, generator=torch.Generator().manual_seed(seed)).tolist()
    found = torch.empty(len(shown), 3, SIDE, SIDE)
    mean, std = torch.tensor(MEAN).view(3, 1, 1), torch.tensor(STD).view(3, 1, 1)
    for number in dict.fromkeys(shown):
        image = read_image(files[number], 3)
        for position in (place for place, other in enumerate(shown) if other == number):
            area, left, top = chance[position]
            side = max(1, round(min(image.size) * (LEAST_AREA + (1 - LEAST_AREA) * area) ** 0.5))
            x, y = round(left * (image.width - side)), round(top * (image.height - side))
            cut = image.resize((SIDE, SIDE), Image.Resampling.BICUBIC, (x, y, x + side, y + side))
            found[position] = (torch.from_numpy(np.array(cut)).permute(2, 0, 1) / 255 - mean) / std
    return found


def calibration_crops(photographs: Photographs, count: int, seed: int) -> Samples:
    """Crops to calibrate with, and the photographs that none of the held-out ones shows, to take views of."""
    shown = order(count, len(photographs.fit), seed)
    samples = Samples(crops(photographs.fit, shown, seed), "crops of photographs")
    fitted = sorted({shown[position] for position in samples.fit_positions()})
    pictures = [picture_of(read_image(photographs.fit[number], 3), (SIDE, SIDE)) for number in fitted]
    return replace(samples, pictures=Pictures.of_images(pictures, (SIDE, SIDE), MEAN, STD))


def judging_crops(photographs: Photographs, each: int) -> Tensor:
    """So many crops of each judging photograph, the same in every run."""
    return crops(photographs.judge, [number for number in range(len(photographs.judge)) for _ in range(each)], seed=0)
