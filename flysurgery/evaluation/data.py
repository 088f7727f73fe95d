"""Images for one model, found, read and prepared: digits, fractals, folders; with classes, or without them to calibrate with."""

import logging
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from PIL import Image
from timm.data.config import resolve_data_config
from timm.data.transforms_factory import create_transform
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset, TensorDataset

from flysurgery.calibration import ASPECT, DEFAULT_SAMPLES, SIDES, Pictures, Samples, samples_of
from flysurgery.errors import DataError, WalkError, raised_as
from flysurgery.evaluation.fractals import Fractals
from flysurgery.surgery import classes_of
from flysurgery.walker import example_input

_logger = logging.getLogger(__name__)

Item = TypeVar("Item")
Part = Literal["train", "held-out"]

MADE = ("digits", "fractals")  # data sets that need no files
DIGITS = 10

SMALL = 512  # for fewer images than this a reading process costs more than it saves
MAX_WORKERS = 8

FRACTALS_A_CLASS = 50  # held-out fractals of each class
SPLIT_SEED = 0  # sets the order of the digits by which they are split, in training and in evaluation
WHITE = 16  # the largest value of a digit's pixel
MOST_THREADS = 16
MOST_SKIPPED = 10  # in place of so many images in a row the next one is taken, as by timm's own data sets


@dataclass(frozen=True)
class ImageData:
    """``dataset[i]`` is an image of shape (channels, height, width), as the model takes it, and its class."""

    name: str
    dataset: Dataset[Any]
    samples: int
    num_classes: int

    @property
    def workers(self) -> int:
        """How many processes to read images with; none where the images are in memory or few."""
        return 0 if self.name in MADE or self.samples < SMALL else min(MAX_WORKERS, os.cpu_count() or 1)


@dataclass(frozen=True)
class Preparation:
    """What a model wants of its images, also as ``config`` for timm's transforms; ``mean`` and ``std`` normalize each channel."""

    shape: tuple[int, int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    config: Mapping[str, Any]

    @property
    def channels(self) -> int:
        return self.shape[0]

    @property
    def size(self) -> tuple[int, int]:
        return self.shape[1:]

    def transform(self) -> Callable[[Any], Any]:
        """Make what timm does to an image before the model sees it, without augmentation."""
        transform: Any = create_transform(**self.config, is_training=False)
        return transform


def preparation(model: nn.Module) -> Preparation:
    """Find the input size that the model takes, and the normalization that its ``pretrained_cfg`` names, or else timm's default.

    Raises DataError where the model takes something else than images.
    """
    try:
        example = example_input(model)
    except WalkError as error:
        raise DataError(f"it is not known what images the model takes: {error}") from error
    if not isinstance(example, Tensor):
        raise DataError("expected a model of images in one tensor, got one that takes a list of images")
    if example.ndim != 4 or example.shape[1] not in (1, 3):
        raise DataError(f"expected a model of images with 1 or 3 channels, got one that takes inputs of shape {tuple(example.shape)}")
    _, channels, height, width = example.shape
    known = getattr(model, "pretrained_cfg", None) or {}
    config = resolve_data_config({}, pretrained_cfg={**known, "input_size": (channels, height, width)})
    for name in ("mean", "std"):
        values = tuple(config[name])  # a single channel gets the mean of all
        config[name] = values if len(values) == channels else (sum(values) / len(values),) * channels
    return Preparation((channels, height, width), config["mean"], config["std"], config)


def load_data(name: str | Path, model: nn.Module) -> ImageData:
    """Load the data set ``name``, prepared for ``model``, whose weights may be on the meta device.

    "digits" is the held-out third of scikit-learn's digits: 599 of 8x8 pixels, resized to the model's input. "fractals" is computed where
    the model is, in as many classes as it has: 50 held-out images of each. Anything else is a folder with one folder of images for each
    class, prepared as timm does for the model's ``pretrained_cfg``; the classes are numbered in the order of their names.

    Raises DataError where the data are not there or cannot be read, or have another number of classes than the model.
    """
    wanted, classes = preparation(model), classes_of(model)
    if str(name) in MADE:
        dataset = made(str(name), "held-out", model, wanted)
    elif is_folder(name):
        dataset = labelled_pictures(Path(name), wanted.channels, wanted.transform())
    else:
        raise DataError(
            f"there is no data set '{name}': expected 'digits', 'fractals' or a folder with one folder of images for each class"
        )
    found = DIGITS if isinstance(dataset, TensorDataset) else dataset.classes
    if classes is not None and classes != found:
        raise DataError(f"{name} has {found} classes and the model tells {classes} apart; they must be the same")
    return ImageData(str(name), dataset, len(dataset), found)


def made(name: str, part: Part, model: nn.Module, wanted: Preparation) -> TensorDataset | Fractals:
    """Make a part of the digits, or fractals in as many classes as ``model`` has, where it is; a fixed number of each class."""
    if name == "digits":
        return digits(part, wanted.size, mean=wanted.mean, std=wanted.std)
    classes = classes_of(model)
    if not isinstance(classes, int):
        raise DataError("fractals have as many classes as the model, and this one does not say how many it has")
    device = next(model.parameters()).device
    place = "cpu" if device.type == "meta" else device
    return Fractals(part, classes, wanted.size, mean=wanted.mean, std=wanted.std, device=place, samples=FRACTALS_A_CLASS * classes)


def digits(part: Part, size: tuple[int, int], *, mean: Sequence[float], std: Sequence[float]) -> TensorDataset:
    """Give two thirds of scikit-learn's 1797 digits for training, or the held-out third, as pairs of an image and its class.

    Images, float32 of shape (channels, height, width), are scaled to [0, 1], resized bilinearly from 8x8 to ``size``, given one equal
    channel for each ``mean``, and normalized. Raises DataError without scikit-learn.

    Source: E. Alpaydin and C. Kaynak, Optical Recognition of Handwritten Digits, UCI Machine Learning Repository, 1998.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise DataError("the digits come with scikit-learn, which is not installed: pip install 'flysurgery[train]'") from error
    found: Any = load_digits()
    order = np.random.RandomState(SPLIT_SEED).permutation(len(found.images))
    third = len(order) // 3
    chosen = order[:third] if part == "held-out" else order[third:]
    pixels = torch.tensor(found.images[chosen], dtype=torch.float32)[:, None] / WHITE
    images = functional.interpolate(pixels, size=size, mode="bilinear", align_corners=False, antialias=True)
    center, scale = (torch.tensor(values).view(1, -1, 1, 1) for values in (mean, std))
    return TensorDataset((images - center) / scale, torch.tensor(found.target[chosen], dtype=torch.int64))


def is_folder(name: str | Path) -> bool:
    """Whether a data set's name is that of a folder; an empty one is not, although ``Path`` takes it for the present folder."""
    return bool(str(name)) and Path(name).is_dir()


def load_calibration(name: str | Path, model: nn.Module, *, samples: int | None = None, pictures: bool = False) -> Samples:
    """Take ``samples`` images of the data set ``name``, prepared for ``model``, whose weights may be on the meta device.

    "digits" and "fractals" are the parts of these that ``load_data`` does not measure on. A folder may hold images at any depth; they are
    taken evenly from its sorted names. Those that cannot be read are left out, and named in ``Samples.skipped``. By default 512 are
    taken, or as many as there are. With ``pictures`` those of a folder are kept in full as well, at up to twice the model's input, to take
    views of them.

    Raises:
        DataError: there is no such data set, it has fewer readable images than ``samples``, or fewer than two, or all are of one colour.
        OptionError: ``samples`` below 2.
    """
    wanted, folder, count = preparation(model), Path(name), samples or DEFAULT_SAMPLES
    if str(name) in MADE:
        dataset = made(str(name), "train", model, wanted)
        found = torch.stack([dataset[index][0] for index in _order(len(dataset), count)[:count]])
        return samples_of(Samples(found, str(name)), count=samples, shape=wanted.shape)
    if not is_folder(name):
        raise DataError(f"there is no data set '{name}': expected 'digits', 'fractals' or a folder of images")
    transform, paths = wanted.transform(), image_files(folder)
    inputs, kept, skipped = list[Tensor](), list[Tensor](), list[str]()
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
    taken = samples_of(Samples(torch.stack(inputs), str(folder), tuple(skipped)), count=samples, shape=wanted.shape)
    if not pictures:
        return taken
    fit = [kept[index] for index in taken.fit_positions()]
    return replace(taken, pictures=Pictures.of_images(fit, wanted.size, wanted.mean, wanted.std))


def load_unseen(name: str | Path, model: nn.Module, *, samples: int | None = None) -> Samples:
    """Load images to compare models on, as ``load_calibration``, but of "digits" and "fractals" those that it does not take."""
    if str(name) not in MADE:
        return load_calibration(name, model, samples=samples)
    wanted = preparation(model)
    dataset = made(str(name), "held-out", model, wanted)
    return replace(samples_of(dataset, count=samples, shape=wanted.shape), name=str(name))


def _order(count: int, wanted: int) -> Sequence[int]:
    """Order all positions: first ``wanted`` of them that are spread evenly, then the others, to make up for unreadable images."""
    wanted = min(count, wanted)
    chosen = [index * count // wanted for index in range(wanted)]
    return chosen + sorted(set(range(count)) - set(chosen))


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

    if not os.access(folder, os.R_OK | os.X_OK):
        raise DataError(f"{folder} may not be read; allow it, or give another folder of images")
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


def without_traceback(error: DataError) -> DataError:
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
