"""Measures the accuracy of a model."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from flysurgery.calibration import main_output
from flysurgery.errors import DataError, OptionError
from flysurgery.evaluation.data import ImageData, sentence_of

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


@dataclass(frozen=True)
class Comparison:
    """The accuracy before and after a change to a model, on the same ``data``, its name or folder."""

    data: str
    before: Accuracy
    after: Accuracy

    def to_json(self) -> dict[str, Any]:
        """Give the measurements as JSON values."""
        return asdict(self)


def evaluate(model: nn.Module, data: ImageData, *, batch_size: int = 64, device: torch.device | str | None = None) -> Accuracy:
    """Run ``model`` over ``data``, in eval mode and without gradients, on ``device`` (default: where the model is).

    The model is moved to ``device`` and stays there; its mode is set back. Images are cast to its dtype.

    Raises:
        DataError: an image that cannot be read, or outputs that are no scores for the data's classes.
        OptionError: a batch size below 1.
    """
    if batch_size < 1:
        raise OptionError(f"batch_size must be at least 1, got {batch_size}")
    if device is not None:
        model.to(device)
    parameter = next(model.parameters())
    modes = {module: module.training for module in model.modules()}
    first, among = 0, 0
    started = perf_counter()
    try:
        model.eval()
        # not inference_mode: training later uses what FSDP2 gathers here
        with torch.no_grad():
            for images, classes in DataLoader(data.dataset, batch_size, num_workers=data.workers):
                scores = _scores(main_output(model(images.to(parameter.device, parameter.dtype))), len(classes), data)
                right = scores.topk(min(TOP, data.num_classes), dim=1).indices == classes.to(scores.device)[:, None]
                first += int(right[:, 0].sum())
                among += int(right.sum())
    except DataError as error:
        raise sentence_of(error) from error
    finally:
        for module, mode in modes.items():
            module.training = mode
    return Accuracy(first / data.samples, among / data.samples, data.samples, perf_counter() - started)


def _scores(output: object, rows: int, data: ImageData) -> Tensor:
    if not isinstance(output, Tensor) or output.shape != (rows, data.num_classes):
        shape = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
        raise DataError(
            f"{data.name} has {data.num_classes} classes, so scores of shape ({rows}, {data.num_classes}) were expected, got {shape}"
        )
    return output.float()
