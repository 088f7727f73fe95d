"""The inputs that a model is calibrated with: checked, and split into those that fit and those that judge."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils.data import Dataset

from flysurgery.calibration.pictures import Pictures
from flysurgery.errors import DataError, OptionError

DEFAULT_SAMPLES = 512
"""The number of samples where none is given and there are enough."""

HELD_OUT_EVERY = 5
"""Every fifth sample judges and does not fit."""

BATCH = 32
LEAST_BATCHES = 8
"""The least number of batches. Comparing batches shows how well a covariance is known."""


@dataclass(frozen=True)
class Samples:
    """Inputs of a model, prepared as it takes them; they are kept in memory.

    Attributes:
        inputs: shape (samples, *sample).
        name: where they come from.
        skipped: the files that could not be read.
        pictures: the images for the views of reconstruction, none of which shows a judging sample; None for the samples to fit with.
    """

    inputs: Tensor
    name: str = "calibration data"
    skipped: tuple[str, ...] = ()
    pictures: Pictures | None = None

    def __len__(self) -> int:
        return len(self.inputs)

    def fit(self) -> Iterator[Tensor]:
        """The samples to fit with, in batches of at most ``BATCH``, but ``LEAST_BATCHES`` of them where there are enough."""
        return self._batches(~self._is_held_out())

    def held_out(self) -> Iterator[Tensor]:
        """The samples to judge with, in batches."""
        return self._batches(self._is_held_out())

    def without_held_out(self) -> Samples:
        """The samples to fit with, to be split again: some then choose and do not fit, and those held out here had no part in either."""
        return Samples(self.inputs[~self._is_held_out()], self.name, self.skipped)

    def to_view(self) -> Pictures:
        """The images for the views of reconstruction."""
        return Pictures.of_inputs(self.inputs[~self._is_held_out()]) if self.pictures is None else self.pictures

    def fit_positions(self) -> list[int]:
        """The numbers of the samples to fit with."""
        return (~self._is_held_out()).nonzero()[:, 0].tolist()

    @property
    def held_out_count(self) -> int:
        """How many samples judge."""
        return int(self._is_held_out().sum())

    def _is_held_out(self) -> Tensor:
        position = torch.arange(len(self))
        return position % HELD_OUT_EVERY == min(HELD_OUT_EVERY, len(self)) - 1

    def _batches(self, wanted: Tensor) -> Iterator[Tensor]:
        chosen = wanted.nonzero()[:, 0]
        size = max(1, min(BATCH, len(chosen) // LEAST_BATCHES))
        return (self.inputs[part] for part in chosen.split(size))


Data: TypeAlias = Samples | Tensor | Iterable[object] | Dataset[Any]
"""The data that ``samples_of`` accepts."""


def samples_of(
    data: Data,
    *,
    count: int | None = None,
    shape: tuple[int, ...] | None = None,
) -> Samples:
    """Take ``count`` samples from ``data``; without a count, ``DEFAULT_SAMPLES`` or as many as there are.

    ``data`` is a tensor of shape (samples, *sample), or something to iterate over that gives such tensors or single samples, alone or
    first in a tuple, as a ``DataLoader`` and a ``Dataset`` with labels do. ``shape`` is that of one sample, as the model takes it.

    Raises:
        OptionError: a count below 2.
        DataError: fewer samples than the count, fewer than 2, samples of another shape, or no floating-point numbers.
    """
    if count is not None and (type(count) is not int or count < 2):
        raise OptionError(f"calibration needs at least 2 samples, one to fit with and one to judge with; got samples={count!r}")
    wanted = count or DEFAULT_SAMPLES
    known = data if isinstance(data, Samples) else None
    source = data.inputs if isinstance(data, Samples) else data
    inputs = source[:wanted] if isinstance(source, Tensor) else _gathered(source, wanted, shape)
    name = known.name if known else Samples.name
    _check(inputs, name, shape)
    if len(inputs) < (count or 2):
        asked = f"{count} were asked for" if count else "at least 2 are needed"
        raise DataError(f"{name}: {asked} and there are {len(inputs)} samples")
    return Samples(inputs.detach(), name, known.skipped if known else (), known.pictures if known else None)


def _gathered(source: object, wanted: int, shape: tuple[int, ...] | None) -> Tensor:
    parts: list[Tensor] = []
    found = 0
    for item in _items(source):
        first = next(iter(item), None) if isinstance(item, list | tuple) else item
        if not isinstance(first, Tensor):
            raise DataError(f"expected batches of tensors as calibration data, got {type(first).__name__}")
        batch = first[None] if shape is not None and tuple(first.shape) == shape else first
        if parts and batch.shape[1:] != parts[0].shape[1:]:
            raise DataError(f"calibration samples must have one shape, got {tuple(parts[0].shape[1:])} and {tuple(batch.shape[1:])}")
        parts.append(batch[: wanted - found])
        found += len(parts[-1])
        if found == wanted:
            break
    if not parts:
        raise DataError("the calibration data hold no samples")
    return torch.cat(parts)


def _items(source: Any) -> Iterable[object]:
    if isinstance(source, Iterable) and not isinstance(source, str | bytes):
        return source
    if hasattr(source, "__getitem__") and hasattr(source, "__len__") and not isinstance(source, str | bytes):  # a Dataset
        return (source[index] for index in range(len(source)))
    raise DataError(f"expected calibration data as a tensor or as batches of tensors, got {source!r}")


def _check(inputs: Tensor, name: str, shape: tuple[int, ...] | None) -> None:
    found = tuple(inputs.shape[1:])
    if shape is not None and found != shape:
        image = len(shape) == len(found) == 3
        sides = zip(("number of channels", "height", "width"), shape, found, strict=True) if image else ()
        differing = " and ".join(side for side, expected, came in sides if expected != came)
        what = f" (another {differing})" if differing else ""
        raise DataError(f"{name}: the model takes samples of shape {shape}, got {found}{what}; prepare them as the model takes them")
    if not inputs.is_floating_point():
        raise DataError(f"{name}: expected floating-point inputs, normalized as the model takes them, got {inputs.dtype}")
    if not bool(inputs.isfinite().all()):
        raise DataError(f"{name}: the samples have NaN or infinite entries")
