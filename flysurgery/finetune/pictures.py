"""Data sets of pictures: which files of a folder train and which are held out, and how they are read."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import Dataset

from flysurgery.calibration import Pictures, main_output, unchanged_state
from flysurgery.errors import DataError, first_line
from flysurgery.evaluation import Preparation, digits
from flysurgery.evaluation.data import check_not_blank, image_files, picture_of, read_image, read_many
from flysurgery.surgery import classes_of
from flysurgery.walker import example_input

_logger = logging.getLogger(__name__)

LEVELS = 255

MOST_SKIPPED = 10
"""In place of so many images in a row the next one is taken, as by timm's own data sets."""

TRAIN = ("train", "training")
HELD_OUT = ("val", "validation", "eval", "test")
"""Names of the folders that hold the two parts of a data set."""

ASIDE = 10
"""One image in so many is held out where a folder has no held-out part."""

MOST_BYTES = 4 << 30


class PictureSet(Dataset[Any]):
    """Pairs of a picture, which ``read`` makes of an item, and its class. timm's loader sets ``transform``.

    If it ``skips``, the next picture is taken in place of one that cannot be read, with a warning, as by timm's own data sets.
    ``classes`` counts the classes; None without labels.
    """

    def __init__(
        self,
        items: Sequence[tuple[Any, int]],
        read: Callable[[Any], Any],
        classes: int | None,
        transform: Any = None,
        *,
        skips: bool = False,
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


def digit_pictures(channels: int) -> PictureSet:
    """Give the training part of scikit-learn's digits as pictures of 8x8 pixels, in 1 or 3 equal channels."""
    images, classes = digits("train", (8, 8), mean=[0.0], std=[1.0]).tensors
    grey = (images[:, 0] * LEVELS).round().byte().numpy()
    pictures = [Image.fromarray(pixels).convert("L" if channels == 1 else "RGB") for pixels in grey]
    return PictureSet(list(zip(pictures, classes.tolist(), strict=True)), Image.Image.copy, 10)


def unlabelled_pictures(paths: Sequence[Path], channels: int, transform: Any = None, *, skips: bool = False) -> PictureSet:
    """Give pictures of a model's channels, with 0 for a class."""
    return PictureSet([(path, 0) for path in paths], partial(read_image, channels=channels), None, transform, skips=skips)


def labelled_pictures(folder: Path, channels: int) -> PictureSet:
    """Give the pictures of a folder of classes, or of its ``train``, to train on; classes are numbered as the evaluation does."""
    from torchvision.datasets import ImageFolder

    try:
        found = ImageFolder(_training_part(folder))
    except OSError as error:
        raise DataError(f"{folder} cannot be opened as a data set for training: {first_line(error)}") from error
    return PictureSet(found.samples, partial(read_image, channels=channels), len(found.classes), skips=True)


def named_pictures(name: str, root: Path | None, split: str, channels: int) -> Any:
    """Open one of timm's data sets, which must say how many images it has."""
    from timm.data.dataset_factory import create_dataset

    if "/" not in name or (root is None and name.partition("/")[0] not in ("torch", "hfds", "hfids", "tfds", "wds")):
        raise DataError(
            f"there is no data set '{name}': expected 'digits', 'fractals', a folder with one folder of images for each class, "
            "or the name of a timm data set such as torch/cifar10"
        )
    if root is None:
        raise DataError(f"the data set {name} of timm needs the folder that it is or will be kept in: give --data-root DIR")
    extra: dict[str, Any] = {"loader": partial(read_image, channels=channels)} if name in ("torch/folder", "torch/image_folder") else {}
    mode = "L" if channels == 1 else "RGB"
    try:
        dataset: Any = create_dataset(name, root=str(root), split=split, is_training=split == "train", input_img_mode=mode, **extra)
        len(dataset)
    except Exception as error:  # each of timm's sources fails in its own way, assertions included
        raise DataError(f"{name} cannot be opened as a data set for training: {first_line(error)}") from error
    return dataset


def classes_in(dataset: Any) -> int | None:
    """Say how many classes a data set has; None where it does not say."""
    known = getattr(dataset, "classes", None) or getattr(getattr(dataset, "reader", None), "class_to_idx", None)
    return known if isinstance(known, int) else len(known) if known else None


def class_folders(folder: Path) -> int:
    """Count the folders in the folder, or in its ``train``: its classes if it is labelled."""
    return sum(each.is_dir() for each in _training_part(folder).iterdir())


def is_labelled(folder: Path, model: nn.Module) -> bool:
    """Say whether the model is a classifier and the folder, or its ``train``, holds one folder for each of its classes."""
    found = class_folders(folder)
    return found > 0 and found == _classes_told(model)


def held_out_part(folder: Path) -> Path | None:
    """Find the folder of held-out images in ``folder``."""
    return next((folder / each for each in HELD_OUT if (folder / each).is_dir()), None)


def unlabelled_files(folder: Path, *, aside: bool = True) -> tuple[list[Path], list[Path]]:
    """List the images to train on and the held-out ones, by their sorted names, at any depth.

    Held out is what lies in a folder ``val`` or the like, or else every tenth image. Without ``aside`` all images train.
    """
    part, apart = _training_part(folder), held_out_part(folder)
    paths = [path for path in image_files(part) if apart is None or apart not in path.parents]
    if not aside:
        return paths, []
    if apart is not None:
        return paths, image_files(apart)
    if len(paths) < 2:
        raise DataError(f"{folder} has one image, which cannot both be trained on and be held out; give more images, or --evaluate FOLDER")
    return [path for index, path in enumerate(paths) if index % ASIDE], paths[::ASIDE]


def _training_part(folder: Path) -> Path:
    return next((folder / each for each in TRAIN if (folder / each).is_dir()), folder)


def _classes_told(model: nn.Module) -> int | None:
    """Give the classes that the model names, or else how many scores it gives."""
    classes = classes_of(model)
    if classes is not None:
        return classes
    parameter, example = next(model.parameters()), example_input(model)
    if not isinstance(example, Tensor):
        return None
    with torch.no_grad(), unchanged_state(model):
        output = main_output(model(torch.zeros(example.shape, device=parameter.device, dtype=parameter.dtype)))
    return output.shape[1] if isinstance(output, Tensor) and output.ndim == 2 else None


def read_pictures(paths: Sequence[Path], wanted: Preparation, *, most: int = MOST_BYTES) -> Pictures | None:
    """Read pictures into memory, scaled down to twice the model's input; None where they would take more than ``most`` bytes.

    Those that cannot be read are left out, with a warning that names the first of them. Pictures of one colour each are refused.
    """
    images: list[Tensor] = []
    failed: list[DataError] = []
    height = width = 0
    for each in read_many(lambda path: picture_of(read_image(path, wanted.channels), wanted.size), paths):
        if isinstance(each, DataError):
            failed.append(each)
            continue
        images.append(each)
        height, width = max(height, each.shape[1]), max(width, each.shape[2])
        if len(paths) * wanted.channels * height * width > most:
            return None
    if not images:
        raise DataError(f"none of the {len(paths)} images can be read, the first for this reason: {failed[0]}")
    if failed:
        _logger.warning("%s of %s images are left out, the first for this reason: %s", len(failed), len(paths), failed[0])
    check_not_blank(images)
    return Pictures.of_images(images, wanted.size, wanted.mean, wanted.std)
