"""The images of a folder without labels: which train, and which are held out."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from flysurgery.calibration import unchanged_state
from flysurgery.errors import DataError
from flysurgery.evaluation import Preparation
from flysurgery.evaluation.calibration import image_files
from flysurgery.evaluation.data import read_image, transform_of
from flysurgery.walker import example_input

FOLDERS = ("val", "validation", "eval", "test")
"""Names under which a folder of images keeps the held-out ones beside ``train``."""

TRAIN = ("train", "training")

ASIDE = 10
"""One image in so many is held out where a folder holds none aside itself."""


class UnlabelledPictures(Dataset[Any]):
    """Pictures of a model's channels, with 0 for a class; ``transform`` is set by who reads them."""

    def __init__(self, paths: Sequence[Path], channels: int, transform: Any = None) -> None:
        self.paths, self.transform = list(paths), transform
        self.classes = ()
        self._channels = channels

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        image = read_image(str(self.paths[index]), self._channels)
        return (image if self.transform is None else self.transform(image)), 0


def class_folders(folder: Path) -> int:
    """How many folders the folder, or its ``train``, holds: its classes if it is labelled."""
    return sum(each.is_dir() for each in _training_part(folder).iterdir())


def is_labelled(folder: Path, model: nn.Module) -> bool:
    """Whether the model is a classifier and the folder, or its ``train``, holds one folder for each of its classes."""
    found = class_folders(folder)
    return found > 0 and found == _classes_of(model)


def held_out_part(folder: Path) -> Path | None:
    """The folder of held-out images in ``folder``, if there is one."""
    return next((folder / each for each in FOLDERS if (folder / each).is_dir()), None)


def unlabelled_files(folder: Path, *, aside: bool = True) -> tuple[list[Path], list[Path]]:
    """The images to train on and the held-out ones, by their sorted names, at any depth.

    Held out is what lies in a folder ``val`` or the like, or else every tenth image. Without ``aside`` all images train.

    Raises:
        DataError: there are no images, or only one and it would be held out.
    """
    part, apart = _training_part(folder), held_out_part(folder)
    paths = [path for path in image_files(part) if apart is None or apart not in path.parents]
    if apart is not None and aside:
        return paths, image_files(apart)
    if not aside:
        return paths, []
    if len(paths) < 2:
        raise DataError(f"{folder} has one image, which cannot both be trained on and be held out; give more images, or --evaluate FOLDER")
    held_out = paths[::ASIDE]
    kept = set(held_out)
    return [path for path in paths if path not in kept], held_out


def prepared(paths: Sequence[Path], wanted: Preparation) -> UnlabelledPictures:
    """Pictures as the model takes them, without augmentation."""
    return UnlabelledPictures(paths, wanted.channels, transform_of(wanted))


def _classes_of(model: nn.Module) -> int | None:
    """What the model says, or else how many scores it gives."""
    classes = getattr(model, "num_classes", None)
    if isinstance(classes, int):
        return classes
    parameter, example = next(model.parameters()), example_input(model)
    if not isinstance(example, Tensor):
        return None
    with torch.no_grad(), unchanged_state(model):
        output = model(torch.zeros(example.shape, device=parameter.device, dtype=parameter.dtype))
    return output.shape[1] if isinstance(output, Tensor) and output.ndim == 2 else None


def _training_part(folder: Path) -> Path:
    return next((folder / each for each in TRAIN if (folder / each).is_dir()), folder)
