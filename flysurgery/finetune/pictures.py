"""Data sets of pictures, as timm's loader takes them: with a ``transform`` that it sets."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from torch.utils.data import Dataset

from flysurgery.errors import DataError
from flysurgery.evaluation import digits

_logger = logging.getLogger(__name__)

LEVELS = 255

MOST_SKIPPED = 10
"""Images in a row for which the next one is taken: as many as timm's own data sets skip."""


class DigitPictures(Dataset[Any]):
    """The training part of scikit-learn's digits as pictures of 8x8 pixels, in 1 or 3 equal channels."""

    def __init__(self, channels: int) -> None:
        from PIL import Image

        images, classes = digits("train", (8, 8), mean=[0.0], std=[1.0]).tensors
        grey = (images[:, 0] * LEVELS).round().byte().numpy()
        self._pictures = [Image.fromarray(each).convert("L" if channels == 1 else "RGB") for each in grey]
        self._classes = classes.tolist()
        self.transform: Any = None

    def __len__(self) -> int:
        return len(self._pictures)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        picture = self._pictures[index]
        return (picture if self.transform is None else self.transform(picture)), self._classes[index]


class Skipping(Dataset[Any]):
    """Pictures to train on, the next one in place of one that cannot be read, with a warning, as timm's own data sets do it."""

    def __init__(self, pictures: Any) -> None:
        self._pictures, self.classes = pictures, pictures.classes

    @property
    def transform(self) -> Any:
        return self._pictures.transform

    @transform.setter
    def transform(self, transform: Any) -> None:
        self._pictures.transform = transform

    def __len__(self) -> int:
        return len(self._pictures)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        for ahead in range(MOST_SKIPPED):
            try:
                return self._pictures[(index + ahead) % len(self)]
            except DataError as error:
                _logger.warning("%s; the next image is taken for it", error)
        raise DataError(f"{MOST_SKIPPED} images in a row cannot be read; the warnings above name them")


def open_dataset(name: str, root: Path | None, split: str, channels: int, *, training: bool) -> Any:
    """A folder of images, or one of timm's data sets by its name.

    Raises:
        DataError: there is none of that name, or it says not how many images it has.
    """
    from timm.data.dataset_factory import create_dataset

    mode = "L" if channels == 1 else "RGB"
    try:
        if Path(name).is_dir():
            # torchvision's folders: classes in the order of their names, as the evaluation numbers them.
            dataset: Any = create_dataset("torch/image_folder", root=name, split=split, loader=_reader(mode))
            dataset = Skipping(dataset) if training else dataset
        elif "/" in name and root is not None:
            extra = {"loader": _reader(mode)} if name in ("torch/folder", "torch/image_folder") else {}
            dataset = create_dataset(name, root=str(root), split=split, is_training=training, input_img_mode=mode, **extra)
        elif "/" in name and name.partition("/")[0] in ("torch", "hfds", "hfids", "tfds", "wds"):
            raise DataError(f"the data set {name} of timm needs the folder that it is or will be kept in: give --data-root DIR")
        else:
            raise DataError(
                f"there is no data set '{name}': expected 'digits', 'fractals', a folder with one folder of images for each class, "
                "or the name of a timm data set such as torch/cifar10"
            )
        len(dataset)
    except DataError:
        raise
    except Exception as error:  # each of timm's sources fails in its own way, assertions included
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
        raise DataError(f"{name} cannot be opened as a data set for training: {reason}") from error
    return dataset


def dataset_classes(dataset: Any) -> int | None:
    """How many classes a data set says that it has."""
    known = getattr(dataset, "classes", None) or getattr(getattr(dataset, "reader", None), "class_to_idx", None)
    return len(known) if known else None


def _reader(mode: str) -> Any:
    return _Reader(mode)


class _Reader:
    """Reads one picture; an object, not a closure, so that processes that are spawned can be given it."""

    def __init__(self, mode: str) -> None:
        self.mode = mode

    def __call__(self, path: str) -> Any:
        from PIL import Image

        try:
            with Image.open(path) as picture:
                return picture.convert(self.mode)
        except OSError as error:  # PIL's errors for what is no image, or is cut short, are of this kind
            raise DataError(f"{path} cannot be read as an image: {str(error).splitlines()[0].rstrip('.')}") from error
