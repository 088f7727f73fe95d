"""Pictures read once, into memory, to take views of."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from PIL import Image
from torch import Tensor

from flysurgery.calibration import ASPECT, SIDES, Pictures
from flysurgery.errors import DataError
from flysurgery.evaluation import Preparation
from flysurgery.evaluation.calibration import picture_of
from flysurgery.evaluation.data import read_image

MOST_BYTES = 4 << 30
MOST_THREADS = 16

_logger = logging.getLogger(__name__)


def read_pictures(paths: Sequence[Path], wanted: Preparation, *, most: int = MOST_BYTES) -> Pictures | None:
    """The pictures in files, scaled down to twice the model's input, or None where they would take more than ``most`` bytes.

    What cannot be read is left out, with a warning that names the first of them.

    Raises:
        DataError: no picture can be read, or each is of one colour.
    """
    size = (wanted.height, wanted.width)

    def read(path: Path) -> Tensor | DataError:
        try:
            return picture_of(read_image(str(path), wanted.channels), size)
        except DataError as error:
            return error
        except Image.DecompressionBombError as error:
            return DataError(f"{path} cannot be read as an image: {error}")

    with ThreadPoolExecutor(min(MOST_THREADS, 2 * (os.cpu_count() or 1))) as threads:
        sides = [each for each in threads.map(lambda path: _sides(path, size), paths) if each is not None]
        if sides and len(sides) * wanted.channels * max(h for h, _ in sides) * max(w for _, w in sides) > most:
            return None
        found = list(threads.map(read, paths))
    images = [each for each in found if isinstance(each, Tensor)]
    failed = [each for each in found if isinstance(each, DataError)]
    if not images:
        raise DataError(f"none of the {len(paths)} images can be read, the first for this reason: {failed[0]}")
    if failed:
        _logger.warning("%s of %s images are left out, the first for this reason: %s", len(failed), len(paths), failed[0])
    if all(bool((image.flatten(1) == image[:, :1, :1].flatten(1)).all()) for image in images):
        raise DataError(f"all {len(images)} images are of one colour each, from which nothing can be learned; give photographs")
    return Pictures.of_images(images, size, wanted.mean, wanted.std)


def _sides(path: Path, size: tuple[int, int]) -> tuple[int, int] | None:
    """Height and width that a picture will have at most, from the head of its file; None for what is no picture."""
    try:
        with Image.open(path) as image:
            width, height = image.size
    except (OSError, Image.DecompressionBombError):
        return None
    scale = min(1.0, SIDES * max(size) / min(width, height))
    longest = ASPECT * min(width, height)
    return round(scale * min(height, longest)) + 1, round(scale * min(width, longest)) + 1
