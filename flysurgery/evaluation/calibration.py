"""Images without their classes, as a model takes them: to calibrate with, and others that nothing was fitted to."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from flysurgery.calibration import ASPECT, DEFAULT_SAMPLES, SIDES, Pictures, Samples, samples_of
from flysurgery.errors import DataError
from flysurgery.evaluation.data import MADE, Preparation, image_files, made, preparation, read_image


def load_calibration(name: str | Path, model: nn.Module, *, samples: int | None = None, pictures: bool = False) -> Samples:
    """Take ``samples`` images of the data set ``name``, prepared for ``model``, whose weights may be on the meta device.

    "digits" and "fractals" are the parts of these that ``load_data`` does not measure on. A folder may hold images at any depth; what
    its folders are called does not matter. Images that cannot be read are left out, and named in ``Samples.skipped``. The
    images are spread evenly over the sorted names. By default 512 are taken, or as many as there are. With ``pictures`` those of a folder
    are kept in full as well, at up to twice the model's input, to take views of them.

    Raises:
        DataError: there is no such data set, it has fewer readable images than ``samples``, or fewer than two, or all are of one colour.
        OptionError: ``samples`` below 2.
    """
    wanted = preparation(model)
    if str(name) in MADE:
        dataset = made(str(name), "train", model, wanted)
        count = samples or DEFAULT_SAMPLES
        inputs = torch.stack([dataset[index][0] for index in _order(len(dataset), count)[:count]])
        return samples_of(Samples(inputs, str(name)), count=samples, shape=wanted.shape)
    if not Path(name).is_dir():
        raise DataError(f"there is no data set '{name}': expected 'digits', 'fractals' or a folder of images")
    return _of_folder(Path(name), wanted, samples, pictures=pictures)


def load_unseen(name: str | Path, model: nn.Module, *, samples: int | None = None) -> Samples:
    """Load images to compare models on, prepared for ``model``: of "digits" and "fractals" those that calibration does not take.

    Anything else is a folder of images at any depth. Takes ``samples`` of them, by default 512 or as many as there are.

    Raises:
        DataError: there is no such data set, it has fewer readable images than ``samples``, or fewer than two, or all are of one colour.
        OptionError: ``samples`` below 2.
    """
    if str(name) not in MADE:
        return load_calibration(name, model, samples=samples)
    wanted = preparation(model)
    dataset = made(str(name), "held-out", model, wanted)
    count = samples if samples is not None else min(len(dataset), DEFAULT_SAMPLES)
    return replace(samples_of(dataset, count=count, shape=wanted.shape), name=str(name))


def _of_folder(folder: Path, wanted: Preparation, samples: int | None, *, pictures: bool) -> Samples:
    transform, paths = wanted.transform(), image_files(folder)
    count = samples or DEFAULT_SAMPLES
    inputs: list[Tensor] = []
    kept: list[Tensor] = []
    skipped: list[str] = []
    for index in _order(len(paths), count):
        try:
            image = read_image(paths[index], wanted.channels)
        except DataError:
            skipped.append(paths[index].relative_to(folder).as_posix())
            continue
        inputs.append(transform(image))
        if pictures:
            kept.append(picture_of(image, wanted.size))
        if len(inputs) == count:
            break
    if not inputs:
        raise DataError(f"none of the {len(paths)} images in {folder} can be read, the first is {skipped[0]}")
    if skipped and len(inputs) < (samples or 2):
        raise DataError(
            f"{folder}: {samples or 2} samples are needed, and only {len(inputs)} images can be read; "
            f"unreadable are {', '.join(skipped[:5])}{', ...' if len(skipped) > 5 else ''}"
        )
    check_not_blank(inputs)
    found = samples_of(Samples(torch.stack(inputs), str(folder), tuple(skipped)), count=samples, shape=wanted.shape)
    if not kept:
        return found
    fit = [kept[index] for index in found.fit_positions()]
    return replace(found, pictures=Pictures.of_images(fit, wanted.size, wanted.mean, wanted.std))


def _order(count: int, wanted: int) -> Sequence[int]:
    """Order all positions: first ``wanted`` of them that are spread evenly, then the others, to make up for unreadable images."""
    chosen = [index * count // wanted for index in range(wanted)] if count > wanted else list(range(count))
    return chosen + sorted(set(range(count)) - set(chosen))


def check_not_blank(images: Sequence[Tensor]) -> None:
    """Refuse images of shape (channels, height, width) that are of one colour each (DataError)."""
    if all(bool((image == image[:, :1, :1]).all()) for image in images):
        raise DataError(f"all {len(images)} images are of one colour each, from which nothing can be learned; give photographs")


def picture_of(image: Image.Image, size: tuple[int, int]) -> Tensor:
    """Give a PIL image as uint8 of shape (channels, height, width), for ``Pictures``: scaled down, and cut where it is long."""
    scale = min(1.0, SIDES * max(size) / min(image.size))
    width, height = (max(1, round(side * scale)) for side in image.size)
    image = image.resize((width, height), Image.Resampling.BICUBIC) if scale < 1 else image
    longest = math.ceil(ASPECT * min(width, height))
    left, upper = max(0, (width - longest) // 2), max(0, (height - longest) // 2)
    pixels = np.array(image.crop((left, upper, left + min(width, longest), upper + min(height, longest))))
    return torch.from_numpy(pixels if pixels.ndim == 3 else pixels[..., None]).movedim(-1, 0)
