"""Which images train and which are held out: digits, fractals, folders with and without classes, timm's data sets."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from PIL import Image
from timm.data.dataset_factory import create_dataset
from torch import Tensor, nn

from flysurgery.calibration import Pictures, main_output, unchanged_state
from flysurgery.errors import DataError, raised_as
from flysurgery.evaluation import Fractals, ImageData, Preparation, digits, load_data, preparation
from flysurgery.evaluation import data as reading
from flysurgery.finetune.batches import Batches, generated_batches, loaded_batches, viewed_batches
from flysurgery.finetune.settings import Settings
from flysurgery.surgery import classes_of
from flysurgery.walker import example_input

if TYPE_CHECKING:
    from accelerate import Accelerator

_logger = logging.getLogger(__name__)

TRAIN, HELD_OUT = ("train", "training"), ("val", "validation", "eval", "test")  # names of the folders that hold the two parts of a data set
ASIDE = 10  # one image in so many is held out where a folder has no held-out part
DIGIT_CROP, PHOTO_CROP, VIEW_CROP = 0.7, 0.08, 0.25  # the least share that a crop keeps; a digit must stay one, photographs have timm's
IMAGES_A_CLASS = 256  # generated images of each class in an epoch, unless the settings say otherwise
MOST_BYTES = 4 << 30


@dataclass(frozen=True)
class TrainingData:
    """A data set by name; ``open`` gives this process its share of the batches. Classes mean nothing where it is not ``labelled``."""

    name: str
    num_classes: int
    samples: int
    open: "Callable[[Accelerator], Batches]"
    labelled: bool = True


def training_data(
    name: str | Path, model: nn.Module, settings: Settings, *, root: Path | None = None, teacher: bool = False, aside: bool = True
) -> TrainingData:
    """Find the training images ``name``, prepared for ``model``.

    "digits": two thirds of scikit-learn's. "fractals": generated on the device, never the same twice, in as many classes as the model has.
    A folder that holds one folder of images for each class, itself or its ``train``. A name with a slash and no such folder is one of
    timm's data sets under ``root``, such as ``torch/cifar10`` or ``hfds/NAME``, split "train". In place of an image that cannot be read
    the next one is taken, with a warning that names it, up to ten times in a row.

    With a ``teacher`` no labels are needed: a model without a head takes none. Of a folder that does not have one folder for each class all
    images are taken, at any depth; ``aside`` holds out a tenth of them where the folder has no ``val``.

    Raises DataError where the data are not there, do not fit the model, or are fewer than one batch.
    """
    wanted, classes, folder = preparation(model), classes_of(model), Path(name)
    if str(name) == "fractals":
        return _fractals(wanted, classes, settings)
    if classes == 0 and not teacher:
        raise DataError(f"the model has no head that {name} could train by its classes; give a teacher to imitate, --teacher MODEL")
    how: dict[str, Any] = {"crop": PHOTO_CROP, "flip": 0.5, "jitter": 0.4, "in_memory": False}
    if str(name) == "digits":
        dataset, how = _digit_pictures(wanted.channels), {"crop": DIGIT_CROP, "flip": 0.0, "jitter": 0.0, "in_memory": True}
    elif not reading.is_folder(name):
        dataset = _named_pictures(str(name), root, "train", wanted.channels)
    elif is_labelled(folder, model) or (_class_folders(folder) and not teacher):
        dataset = reading.labelled_pictures(_training_part(folder), wanted.channels, skips=True)
    elif teacher:
        if classes != 0 and _class_folders(folder):
            _logger.warning("%s has not one folder of images for each class of the model, so it is used without labels", name)
        return _unlabelled(folder, wanted, settings, aside=aside)
    else:
        raise DataError(f"{name} holds no folder of images for each class; give a teacher that needs none, --teacher MODEL")
    found, samples = _classes_in(dataset), len(dataset)
    if classes and found is not None and classes != found:
        raise DataError(f"{name} has {found} classes and the model tells {classes} apart; they must be the same")
    _check_batch(name, samples, settings)
    opens = partial(loaded_batches, dataset, wanted, settings, **how)
    return TrainingData(str(name), found or classes or 0, samples, opens, labelled=classes != 0)


def held_out_data(name: str | Path, model: nn.Module, *, root: Path | None = None, teacher: bool = False) -> ImageData | None:
    """Find the held-out images that go with the training images ``name``; None where a folder has none.

    Images without labels need a ``teacher``, and their held-out images have no classes either. Raises DataError where they do not fit.
    """
    folder = Path(name)
    apart = name if str(name) in reading.MADE or not reading.is_folder(name) else _part(folder, HELD_OUT)
    if apart is not None:
        return judging_data(apart, model, root=root, teacher=teacher)
    if not teacher or is_labelled(folder, model):
        return None
    return _without_classes(folder, unlabelled_files(folder)[1], preparation(model))


def judging_data(name: str | Path, model: nn.Module, *, root: Path | None = None, teacher: bool = False) -> ImageData:
    """Find all images of the data set ``name``, to measure with; with a ``teacher`` those of a folder need no labels.

    Raises DataError where they are not there, or do not fit the model.
    """
    classes, folder, wanted = classes_of(model), Path(name), preparation(model)
    if str(name) == "digits" and classes == 0:
        dataset = reading.made("digits", "held-out", model, wanted)
        return ImageData("digits", dataset, len(dataset), 0)
    if str(name) not in reading.MADE and not reading.is_folder(name):
        named = _named_pictures(str(name), root, "validation", wanted.channels)
        named.transform = wanted.transform()
        return ImageData(f"{name} validation", named, len(named), 0 if classes == 0 else _classes_in(named) or classes or 0)
    if str(name) in reading.MADE or not teacher or is_labelled(folder, model):
        return load_data(name, model)
    return _without_classes(folder, reading.image_files(folder), wanted)


def is_labelled(folder: Path, model: nn.Module) -> bool:
    """Say whether the model is a classifier and the folder, or its ``train``, holds one folder for each of its classes."""
    found, classes = _class_folders(folder), classes_of(model)
    if not found or classes is not None:
        return 0 < found == classes
    with unchanged_state(model), torch.no_grad():  # the model does not say, so its scores are counted
        output = main_output(model(example_input(model)))
    return isinstance(output, Tensor) and output.shape[1:] == (found,)


def unlabelled_files(folder: Path, *, aside: bool = True) -> tuple[list[Path], list[Path]]:
    """List the images to train on and the held-out ones, by their sorted names, at any depth.

    Held out is what lies in a folder ``val`` or the like, or else every tenth image. Without ``aside`` all images train.
    """
    apart = _part(folder, HELD_OUT)
    paths = [path for path in reading.image_files(_training_part(folder)) if apart is None or apart not in path.parents]
    if not aside:
        return paths, []
    if apart is not None:
        return paths, reading.image_files(apart)
    if len(paths) < 2:
        raise DataError(f"{folder} has one image, which cannot both be trained on and be held out; give more images, or --evaluate FOLDER")
    return [path for index, path in enumerate(paths) if index % ASIDE], paths[::ASIDE]


def read_pictures(paths: Sequence[Path], wanted: Preparation, *, most: int = MOST_BYTES) -> Pictures | None:
    """Read pictures into memory, scaled down to twice the model's input; None where they would take more than ``most`` bytes.

    Those that cannot be read are left out, with a warning that names the first of them. Pictures of one colour each are refused.
    """
    images, failed, height, width = list[Tensor](), list[DataError](), 0, 0
    for each in reading.read_many(lambda path: reading.picture_of(reading.read_image(path, wanted.channels), wanted.size), paths):
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
    reading.check_not_blank(images)
    return Pictures.of_images(images, wanted.size, wanted.mean, wanted.std)


def _digit_pictures(channels: int) -> reading.PictureSet:
    """Give the training part of scikit-learn's digits as pictures of 8x8 pixels, in 1 or 3 equal channels."""
    images, classes = digits("train", (8, 8), mean=[0.0], std=[1.0]).tensors
    grey = (images[:, 0] * 255).round().byte().numpy()
    pictures = [Image.fromarray(pixels).convert("L" if channels == 1 else "RGB") for pixels in grey]
    return reading.PictureSet(list(zip(pictures, classes.tolist(), strict=True)), Image.Image.copy, reading.DIGITS)


def _named_pictures(name: str, root: Path | None, split: str, channels: int) -> Any:
    """Open one of timm's data sets, which must say how many images it has."""
    if "/" not in name or (root is None and name.partition("/")[0] not in ("torch", "hfds", "hfids", "tfds", "wds")):
        raise DataError(
            f"there is no data set '{name}': expected 'digits', 'fractals', a folder with one folder of images for each class, "
            "or the name of a timm data set such as torch/cifar10"
        )
    if root is None:
        raise DataError(f"the data set {name} of timm needs the folder that it is or will be kept in: give --data-root DIR")
    extra: dict[str, Any] = (
        {"loader": partial(reading.read_image, channels=channels)} if name in ("torch/folder", "torch/image_folder") else {}
    )
    mode = "L" if channels == 1 else "RGB"
    with raised_as(DataError, f"{name} cannot be opened as a data set for training"):
        dataset: Any = create_dataset(name, root=str(root), split=split, is_training=split == "train", input_img_mode=mode, **extra)
        len(dataset)
    return dataset


def _unlabelled(folder: Path, wanted: Preparation, settings: Settings, *, aside: bool) -> TrainingData:
    paths, _ = unlabelled_files(folder, aside=aside)
    _check_batch(folder, len(paths), settings)

    def opens(here: "Accelerator") -> Batches:
        on_cuda = here.device.type == "cuda"  # where pictures take at most a quarter of what is free
        room = min(MOST_BYTES, torch.cuda.mem_get_info(here.device)[0] // 4) if on_cuda else MOST_BYTES
        pictures = None if settings.distorts else read_pictures(paths, wanted, most=room)
        if pictures is not None:
            _check_batch(folder, len(pictures), settings)
            return viewed_batches(pictures, settings, here)
        dataset = reading.unlabelled_pictures(paths, wanted.channels, skips=True)
        return loaded_batches(dataset, wanted, settings, here, crop=VIEW_CROP, flip=0.5, jitter=0.0, in_memory=False)

    return TrainingData(str(folder), 0, len(paths), opens, labelled=False)


def _without_classes(folder: Path, paths: list[Path], wanted: Preparation) -> ImageData:
    return ImageData(str(folder), reading.unlabelled_pictures(paths, wanted.channels, wanted.transform()), len(paths), 0)


def _fractals(wanted: Preparation, classes: int | None, settings: Settings) -> TrainingData:
    if not classes:
        raise DataError("fractals have as many classes as the model, and this one does not say how many it has")
    samples = settings.images_per_epoch or IMAGES_A_CLASS * classes

    def opens(here: "Accelerator") -> Batches:
        images = Fractals("train", classes, wanted.size, mean=wanted.mean, std=wanted.std, device=here.device, seed=settings.seed)
        return generated_batches(images, samples, settings, here)

    return TrainingData("fractals", classes, samples, opens)


def _check_batch(name: str | Path, samples: int, settings: Settings) -> None:
    if settings.batch_size is not None and samples < settings.batch_size:
        raise DataError(f"{name} has {samples} images for training, fewer than one batch of {settings.batch_size}; lower the batch size")


def _part(folder: Path, names: Sequence[str]) -> Path | None:
    return next((folder / each for each in names if (folder / each).is_dir()), None)


def _training_part(folder: Path) -> Path:
    return _part(folder, TRAIN) or folder


def _class_folders(folder: Path) -> int:
    """Count the folders in the folder, or in its ``train``: its classes if it is labelled."""
    return sum(each.is_dir() for each in _training_part(folder).iterdir())


def _classes_in(dataset: Any) -> int | None:
    """Say how many classes a data set has; None where it does not say."""
    known = getattr(dataset, "classes", None) or getattr(getattr(dataset, "reader", None), "class_to_idx", None)
    return known if isinstance(known, int) else len(known) if known else None
