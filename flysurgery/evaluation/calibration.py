"""Images to calibrate with: as the model takes them, without the classes, and none of those that accuracy is measured on."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import Dataset

from flysurgery.calibration import ASPECT, DEFAULT_SAMPLES, SIDES, Pictures, Samples, samples_of
from flysurgery.errors import DataError
from flysurgery.evaluation.data import fractals, load_data, preparation, read_image, transform_of
from flysurgery.evaluation.digits import digits


def load_calibration(name: str | Path, model: nn.Module, *, samples: int | None = None, pictures: bool = False) -> Samples:
    """Take ``samples`` images of the data set ``name``, prepared for ``model``, whose weights may live on meta.

    "digits" and "fractals" are the parts of these that ``load_data`` does not measure on. A folder may hold images at any depth; what
    its folders are called does not matter. Images that cannot be read are left out, and named in ``Samples.skipped``. The
    images are spread evenly over the sorted names. By default 512 are taken, or as many as there are. With ``pictures`` those of a folder
    are kept in full as well, at up to twice the model's input, to take views of them.

    Raises:
        DataError: there is no such data set, or it has fewer readable images than ``samples``, or fewer than two.
        OptionError: ``samples`` below 2.
    """
    wanted = preparation(model)
    size = (wanted.channels, wanted.height, wanted.width)
    skipped: list[str] = []
    kept: list[Tensor] = []
    if str(name) == "digits":
        inputs = _spread(digits("train", (wanted.height, wanted.width), mean=wanted.mean, std=wanted.std), samples)
    elif str(name) == "fractals":
        inputs = _spread(fractals("train", model, wanted), samples)
    elif Path(name).is_dir():
        transform = transform_of(wanted)
        paths = image_files(Path(name))

        def read(path: Path) -> Tensor:
            image = read_image(str(path), wanted.channels)
            if pictures:
                kept.append(picture_of(image, (wanted.height, wanted.width)))
            return transform(image)

        inputs = _read(Path(name), paths, read, samples, skipped)
        if not inputs:
            raise DataError(f"none of the {len(paths)} images in {name} can be read, the first is {skipped[0]}")
        if skipped and len(inputs) < (samples or 2):
            raise DataError(
                f"{name}: {samples or 2} samples are needed, and only {len(inputs)} images can be read; "
                f"unreadable are {', '.join(skipped[:5])}{', ...' if len(skipped) > 5 else ''}"
            )
    else:
        inputs = _spread(load_data(name, model).dataset, samples)
    found = samples_of(Samples(torch.stack(inputs), str(name), tuple(skipped)), count=samples, shape=size)
    if not kept:
        return found
    fit = [kept[index] for index in found.fit_positions()]
    return replace(found, pictures=Pictures.of_images(fit, (wanted.height, wanted.width), wanted.mean, wanted.std))


def picture_of(image: Any, size: tuple[int, int]) -> Tensor:
    """A PIL image as uint8 of shape (channels, height, width), for ``Pictures``: scaled down, and cut where it is long."""
    scale = min(1.0, SIDES * max(size) / min(image.size))
    width, height = (max(1, round(side * scale)) for side in image.size)
    image = image.resize((width, height), Image.Resampling.BICUBIC) if scale < 1 else image
    longest = math.ceil(ASPECT * min(width, height))
    left, upper = max(0, (width - longest) // 2), max(0, (height - longest) // 2)
    pixels = np.array(image.crop((left, upper, left + min(width, longest), upper + min(height, longest))))
    return torch.from_numpy(pixels if pixels.ndim == 3 else pixels[..., None]).movedim(-1, 0)


def image_files(folder: Path) -> list[Path]:
    """All image files of a folder, at any depth, by their names.

    Raises:
        DataError: there are none.
    """
    from torchvision.datasets.folder import IMG_EXTENSIONS

    paths = sorted(path for path in folder.rglob("*") if path.suffix.lower() in IMG_EXTENSIONS and path.is_file())
    if not paths:
        raise DataError(f"there are no images in {folder}; expected files ending in {', '.join(IMG_EXTENSIONS)}")
    return paths


def _order(count: int, wanted: int) -> list[int]:
    """All positions: first ``wanted`` of them that are spread evenly, then the others, to make up for unreadable images."""
    chosen = [index * count // wanted for index in range(min(wanted, count))] if count > wanted else list(range(count))
    return chosen + sorted(set(range(count)) - set(chosen))


def _spread(dataset: Dataset[Any], samples: int | None) -> list[Tensor]:
    count, wanted = len(dataset), samples or DEFAULT_SAMPLES  # pyright: ignore[reportArgumentType]
    return [dataset[index][0] for index in _order(count, wanted)[:wanted]]


def _read(folder: Path, paths: list[Path], read: Any, samples: int | None, skipped: list[str]) -> list[Tensor]:
    wanted = samples or DEFAULT_SAMPLES
    found: list[Tensor] = []
    for index in _order(len(paths), wanted):
        try:
            found.append(read(paths[index]))
        except DataError:
            skipped.append(paths[index].relative_to(folder).as_posix())
        if len(found) == wanted:
            break
    return found
