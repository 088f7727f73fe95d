"""Pictures in files: how they are found and read, and data sets of them."""

import logging
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

from flysurgery.calibration import ASPECT, SIDES
from flysurgery.errors import DataError, raised_as

_logger = logging.getLogger(__name__)

Item = TypeVar("Item")

MOST_THREADS = 16

MOST_SKIPPED = 10  # in place of so many images in a row the next one is taken, as by timm's own data sets


class PictureSet(Dataset[Any]):
    """Pairs of a picture, which ``read`` makes of an item, and its class, of ``classes`` (0: no labels). timm's loader sets ``transform``.

    If it ``skips``, the next picture is taken in place of one that cannot be read, with a warning.
    """

    def __init__(
        self, items: Sequence[tuple[Any, int]], read: Callable[[Any], Any], classes: int, transform: Any = None, *, skips: bool = False
    ) -> None:
        self._items, self._read, self.classes, self.transform, self._skips = items, read, classes, transform, skips

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        if not self._skips:
            return self._picture(index)
        for ahead in range(MOST_SKIPPED):
            try:
                return self._picture((index + ahead) % len(self))
            except DataError as error:
                _logger.warning("%s; the next image is taken for it", error)
        raise DataError(f"{MOST_SKIPPED} images in a row cannot be read; the warnings above name them")

    def _picture(self, index: int) -> tuple[Any, int]:
        item, number = self._items[index]
        picture = self._read(item)
        return (picture if self.transform is None else self.transform(picture)), number


def labelled_pictures(folder: Path, channels: int, transform: Any = None, *, skips: bool = False) -> PictureSet:
    """Give the pictures of a folder with one folder for each class; classes are numbered in the order of their names."""
    from torchvision.datasets import ImageFolder

    with raised_as(DataError, f"{folder} is no image folder, with one folder of images for each class"):
        found = ImageFolder(folder)
    return PictureSet(found.samples, partial(read_image, channels=channels), len(found.classes), transform, skips=skips)


def unlabelled_pictures(paths: Sequence[Path], channels: int, transform: Any = None, *, skips: bool = False) -> PictureSet:
    """Give pictures of a model's channels, with 0 for a class."""
    return PictureSet([(path, 0) for path in paths], partial(read_image, channels=channels), 0, transform, skips=skips)


def image_files(folder: Path) -> list[Path]:
    """List all image files of a folder, at any depth, by their names."""
    from torchvision.datasets.folder import IMG_EXTENSIONS

    paths = sorted(path for path in folder.rglob("*") if path.suffix.lower() in IMG_EXTENSIONS and path.is_file())
    if not paths:
        raise DataError(f"there are no images in {folder}; expected files ending in {', '.join(IMG_EXTENSIONS)}")
    return paths


def read_image(path: str | Path, channels: int) -> Image.Image:
    """Read the image in a file, grey or in colours."""
    with raised_as(DataError, f"{path} cannot be read as an image"), Image.open(path) as image:
        return image.convert("L" if channels == 1 else "RGB")


def read_many(read: Callable[[Item], Tensor], items: Iterable[Item]) -> Iterator[Tensor | DataError]:
    """Read items in threads, in their order; of one that cannot be read the error is given."""

    def tried(item: Item) -> Tensor | DataError:
        try:
            return read(item)
        except DataError as error:
            return error

    with ThreadPoolExecutor(min(MOST_THREADS, 2 * (os.cpu_count() or 1))) as threads:
        try:
            yield from threads.map(tried, items)
        finally:
            threads.shutdown(cancel_futures=True)  # nobody asks for the rest


def sentence_of(error: DataError) -> DataError:
    """Give the error of a reading process as its sentence alone: the process sends it as the last line of a traceback."""
    return DataError(str(error).strip().splitlines()[-1].rpartition("DataError: ")[2])


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
