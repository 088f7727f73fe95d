"""Measures the accuracy of a model."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from flysurgery.calibration import main_output, unchanged_state
from flysurgery.errors import DataError, OptionError
from flysurgery.evaluation.data import ImageData
from flysurgery.evaluation.pictures import sentence_of

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

    ``data`` is what ``load_data`` gives, or a ``DataLoader`` or any other iterable of batches ``(images, labels)``: a tensor of what the
    model takes, and its classes, integers of shape (batch,). ``batch_size`` is that of ``load_data``'s images; batches stay as they are.
    The model is moved to ``device`` and stays there; its mode is set back. Images are cast to its dtype.

    Raises:
        DataError: an image that cannot be read, batches of another form or none, or outputs that are no scores for the data's classes.
        OptionError: a batch size below 1.
    """
    if batch_size < 1:
        raise OptionError(f"batch_size must be at least 1, got {batch_size}")
    if not isinstance(model, nn.Module) or not isinstance(data, Iterable | ImageData):
        found = f"{type(model).__name__} and {type(data).__name__}"
        raise DataError(f"expected a model and then a DataLoader or another iterable of batches (images, labels), got {found}")
    if device is not None:
        model.to(device)
    parameter = next(model.parameters())
    batches = DataLoader(data.dataset, batch_size, num_workers=data.workers) if isinstance(data, ImageData) else data
    first, among, samples = 0, 0, 0
    started = perf_counter()
    try:
        # not inference_mode: training later uses what FSDP2 gathers here
        with unchanged_state(model), torch.no_grad():
            for images, labels in map(_pair, batches):
                scores = _scores(main_output(model(images.to(parameter.device, parameter.dtype))), labels, data)
                right = scores.topk(min(TOP, scores.shape[1]), dim=1).indices == labels.to(scores.device)[:, None]
                first += int(right[:, 0].sum())
                among += int(right.sum())
                samples += len(labels)
    except DataError as error:
        raise (sentence_of(error) if isinstance(data, ImageData) else error) from error
    if not samples:
        raise DataError("there are no images to measure the accuracy on; an iterator that was gone through before gives none")
    return Accuracy(first / samples, among / samples, samples, perf_counter() - started)


def _pair(batch: Any) -> tuple[Tensor, Tensor]:
    images, labels = batch if isinstance(batch, list | tuple) and len(batch) == 2 else (None, None)
    if isinstance(images, Tensor) and isinstance(labels, Tensor) and labels.shape == images.shape[:1] and not labels.is_floating_point():
        return images, labels
    parts = batch if isinstance(batch, list | tuple) else (batch,)
    found = ", ".join(f"{each.dtype} {tuple(each.shape)}" if isinstance(each, Tensor) else type(each).__name__ for each in parts)
    raise DataError(f"expected batches (images, labels), a tensor of images and one class for each of them, got ({found})")


def _scores(output: object, labels: Tensor, data: object) -> Tensor:
    known = data if isinstance(data, ImageData) else None
    if (
        not isinstance(output, Tensor)
        or output.dim() != 2
        or len(output) != len(labels)
        or (known and output.shape[1] != known.num_classes)
    ):
        shape = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
        has = f"{known.name} has {known.num_classes} classes, so scores of shape ({len(labels)}, {known.num_classes}) were" if known else ""
        raise DataError(f"{has or f'scores of shape ({len(labels)}, classes) were'} expected, got {shape}")
    if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < output.shape[1]:
        raise DataError(f"the model tells {output.shape[1]} classes apart, got labels from {int(labels.min())} to {int(labels.max())}")
    return output.float()
