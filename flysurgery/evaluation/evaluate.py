"""Measures the accuracy of a model, and without labels how close it is to another model."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from flysurgery.calibration import Samples, main_output, run, samples_of, unchanged_state
from flysurgery.errors import DataError, OptionError, SurgeryError, WalkError
from flysurgery.evaluation.data import ImageData, load_unseen, preparation, without_traceback
from flysurgery.fidelity import Fidelity, measure_fidelity
from flysurgery.inference import is_optimized
from flysurgery.surgery import classes_of, plan_of
from flysurgery.walker import Cut, find_cuts, survey

TOP = 5


@dataclass(frozen=True)
class Accuracy:
    """Shares of the samples whose class was the model's first guess, or among its first five (all, of fewer classes)."""

    top1: float
    top5: float
    samples: int
    seconds: float

    def __str__(self) -> str:
        return f"top-1 {self.top1:.2%}, top-5 {self.top5:.2%} of {self.samples} samples in {self.seconds:.1f} s"


def evaluate(
    model: nn.Module, data: ImageData | Iterable[tuple[Tensor, Tensor]], *, batch_size: int = 64, device: torch.device | str | None = None
) -> Accuracy:
    """Run ``model`` over ``data``, in eval mode and without gradients, on ``device`` (default: where the model is).

    ``data`` is what ``load_data`` gives, whose images are read in batches of ``batch_size``, or a ``DataLoader`` or any other iterable of
    batches ``(images, labels)``: a tensor of what the model takes, and its classes, integers of shape (batch,).
    The model is moved to ``device`` and stays there; its mode is set back. Images are cast to its dtype.

    Raises:
        DataError: an image that cannot be read, batches of another form or none, or outputs that are no scores for the data's classes.
        OptionError: a batch size below 1.
    """
    _check_batch_size(batch_size)
    if not isinstance(model, nn.Module) or not isinstance(data, Iterable | ImageData):
        found = f"{type(model).__name__} and {type(data).__name__}"
        raise DataError(f"expected a model and then a DataLoader or another iterable of batches (images, labels), got {found}")
    if device is not None:
        model.to(device)
    batches = DataLoader(data.dataset, batch_size, num_workers=data.workers) if isinstance(data, ImageData) else data
    first, among, samples = 0, 0, 0
    started = perf_counter()
    try:
        # not inference_mode: training later uses what FSDP2 gathers here
        with unchanged_state(model), torch.no_grad():
            for images, labels in map(_pair, batches):
                scores = _scores(main_output(run(model, images)), labels, data)
                right = scores.topk(min(TOP, scores.shape[1]), dim=1).indices == labels.to(scores.device)[:, None]
                first += int(right[:, 0].sum())
                among += int(right.sum())
                samples += len(labels)
    except DataError as error:
        raise (without_traceback(error) if isinstance(data, ImageData) else error) from error
    if not samples:
        raise DataError("there are no images to measure the accuracy on; an iterator that was gone through before gives none")
    return Accuracy(first / samples, among / samples, samples, perf_counter() - started)


def _check_batch_size(size: int) -> None:
    if size < 1:
        raise OptionError(f"batch_size must be at least 1, got {size}")


def _pair(batch: Any) -> tuple[Tensor, Tensor]:
    parts = batch if isinstance(batch, list | tuple) else (batch,)
    images, labels = parts if len(parts) == 2 else (None, None)
    if isinstance(images, Tensor) and isinstance(labels, Tensor) and labels.shape == images.shape[:1] and not labels.is_floating_point():
        return images, labels
    found = ", ".join(f"{each.dtype} {tuple(each.shape)}" if isinstance(each, Tensor) else type(each).__name__ for each in parts)
    raise DataError(f"expected batches (images, labels), a tensor of images and one class for each of them, got ({found})")


def _scores(output: object, labels: Tensor, data: object) -> Tensor:
    known = data if isinstance(data, ImageData) else None
    shape = tuple(output.shape) if isinstance(output, Tensor) else ()
    if not isinstance(output, Tensor) or shape[:1] != labels.shape or len(shape) != 2 or (known and shape[1] != known.num_classes):
        has = f"{known.name} has {known.num_classes} classes, so scores of shape ({len(labels)}, {known.num_classes}) were" if known else ""
        got = shape if isinstance(output, Tensor) else type(output).__name__
        raise DataError(f"{has or f'scores of shape ({len(labels)}, classes) were'} expected, got {got}")
    if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < shape[1]:
        raise DataError(f"the model tells {shape[1]} classes apart, got labels from {int(labels.min())} to {int(labels.max())}")
    return output.float()


def compare(
    model: nn.Module, teacher: nn.Module, data: str | Path | Samples, samples: int | None = None, *, batch_size: int = 64
) -> Fidelity:
    """Measure the fidelity of ``model`` to ``teacher`` on ``samples`` images, by default 512 or as many as there are.

    ``data`` is what ``load_unseen`` takes, or gives. Nothing should have been fitted to it. Each model runs where it is, in its dtype and
    in eval mode, and stays as it is. Blocks are compared where one model is dense and both have the same modules, apart from what was
    converted. The last tokens are compared where they have the same name and shape in both.

    Raises:
        DataError: the models take other images or give outputs of other shapes, the data are not there or too few, or outputs are no
            finite numbers.
        SurgeryError: one of the models is optimized for inference, which leaves its blocks out.
        OptionError: ``samples`` below 2, or a batch size below 1.
    """
    _check_batch_size(batch_size)
    check_comparable(model, teacher)
    if isinstance(data, Samples):
        known = samples_of(data, count=samples, shape=preparation(teacher).shape)
    else:
        known = load_unseen(data, teacher, samples=samples)
    found = measure_fidelity(model, teacher, known.inputs.split(batch_size), _compared_cuts(model, teacher))
    numbers = (found.output_cosine, found.token_cosine or 0.0, found.relative_error, *(error for _, error in found.blocks))
    if not all(map(math.isfinite, numbers)):
        raise DataError(f"{known.name}: one of the two models gives outputs that are no finite numbers, so there is nothing to compare")
    return found


def check_comparable(model: nn.Module, teacher: nn.Module) -> None:
    """Check that two models take the same images, tell the same classes apart, and have blocks; raises DataError, SurgeryError."""
    if is_optimized(model) or is_optimized(teacher):
        raise SurgeryError(
            "a model that is optimized for inference has no blocks to compare; put its own layers back first, with "
            "flysurgery.restore(model)"
        )
    mine, theirs = preparation(model), preparation(teacher)
    if mine.shape != theirs.shape:
        taken, other = ("x".join(map(str, each.shape)) for each in (mine, theirs))
        raise DataError(f"the model takes images of {taken} and the one it is held against of {other}; they must be the same")
    if (mine.mean, mine.std) != (theirs.mean, theirs.std):
        raise DataError("the two models normalize their images by another mean or standard deviation; they must be the same")
    classes = [classes_of(each) for each in (model, teacher)]
    widths = [getattr(each, "num_features", None) for each in (model, teacher)]
    if None not in classes and classes[0] != classes[1]:
        raise DataError(
            f"the model tells {classes[0]} classes apart and the one it is held against {classes[1]}; give both the same head, "
            "or none with num_classes=0"
        )
    if classes == [0, 0] and None not in widths and widths[0] != widths[1]:
        raise DataError(f"the model's features are {widths[0]} wide and the other model's {widths[1]}; they must be the same")


def common_cuts(model: nn.Module, other: nn.Module) -> list[tuple[Cut, Cut]]:
    """Pair cuts of ``model``, but those of kind "other", with the other model's in the same places.

    Where the two have not all cuts in the same places, these are the last tokens alone, or none. A model that cannot be traced, which
    can still run, has no cuts.
    """
    cuts, others = _cuts_by_place(model), _cuts_by_place(other)
    kinds = ("start", "block", "tokens") if cuts.keys() == others.keys() else ("tokens",)
    return [(cut, others[place]) for place, cut in cuts.items() if cut.kind in kinds and place in others]


def _cuts_by_place(model: nn.Module) -> dict[tuple[str, str], Cut]:
    """Find the model's cuts, each under its module's name and side."""
    try:
        with unchanged_state(model):
            return {(cut.fqn, cut.side): cut for cut in find_cuts(survey(model))}
    except WalkError:
        return {}


def _compared_cuts(model: nn.Module, teacher: nn.Module) -> tuple[Cut, ...]:
    """Find the cuts at which both are compared; none where they differ in shape.

    Their kinds are those of the dense model: the blocks of a converted one are not known, since its layers have no roles.
    """
    are_dense = [plan_of(each) is None for each in (model, teacher)]
    pairs = common_cuts(model, teacher) if are_dense == [True, False] else common_cuts(teacher, model)
    used = [pair for pair in pairs if any(are_dense) or pair[0].kind == "tokens"]
    return tuple(cut for cut, _ in used) if all(cut.shape[1:] == other.shape[1:] for cut, other in used) else ()
