"""The samples for calibration, checked and split: most are fitted to, the held-out ones measure errors. And pictures to crop from."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils.data import Dataset

from flysurgery.errors import DataError, OptionError

DEFAULT_SAMPLES = 512
"""The number of samples where none is given and there are enough."""

HELD_OUT_EVERY = 5
"""Every fifth sample is held out: it measures errors, and nothing is fitted to it."""

BATCH = 32
LEAST_BATCHES = 8
"""The least number of batches. Comparing batches shows how well a covariance is known."""

SIDES = 2
"""A picture's shorter side is at most so many times the model's input: crops are then seldom made larger."""

ASPECT = 1.5
"""A longer picture is cut to this ratio of its sides, in the middle."""


@dataclass(frozen=True)
class Pictures:
    """Pictures, each in the upper left corner of its part of ``canvas``.

    Attributes:
        canvas: shape (pictures, channels, height, width), uint8, or floating-point numbers that are normalized already. Samples that
            are no images have another shape.
        sizes: shape (pictures, 2), the height and width of each, in float32.
        size: height and width of the model's input.
        mean, std: shape (channels,), what each channel is normalized by; empty where the canvas holds floating-point numbers.
    """

    canvas: Tensor
    sizes: Tensor
    size: tuple[int, int]
    mean: Tensor
    std: Tensor

    def __len__(self) -> int:
        return len(self.canvas)

    @classmethod
    def of_inputs(cls, inputs: Tensor) -> "Pictures":
        """Inputs of a model as they are, shape (samples, *sample): crops are taken of them and made larger."""
        height, width = inputs.shape[-2:] if inputs.ndim == 4 else (0, 0)
        sizes = torch.tensor([[height, width]], dtype=torch.float32).expand(len(inputs), 2)
        return cls(inputs, sizes, (height, width), torch.empty(0), torch.empty(0))

    @classmethod
    def of_images(cls, images: Sequence[Tensor], size: tuple[int, int], mean: Sequence[float], std: Sequence[float]) -> "Pictures":
        """Images of shape (channels, height, width) in uint8, of any sizes; the memory is that of the largest sides for each."""
        sizes = torch.tensor([image.shape[-2:] for image in images])
        canvas = torch.zeros(len(images), images[0].shape[0], *sizes.amax(0).tolist(), dtype=torch.uint8)
        for part, image in zip(canvas, images, strict=True):
            part[:, : image.shape[1], : image.shape[2]] = image
        return cls(canvas, sizes.float(), size, torch.tensor(mean), torch.tensor(std))

    def to(self, device: torch.device) -> "Pictures":
        names = ("canvas", "sizes", "mean", "std")
        return replace(self, **{name: getattr(self, name).to(device) for name in names})


@dataclass(frozen=True)
class Samples:
    """Inputs of a model, prepared as it takes them; they are kept in memory.

    Attributes:
        inputs: shape (samples, *sample).
        name: where they come from.
        skipped: the files that could not be read.
        pictures: images to crop for reconstruction, without those of held-out samples. None: the samples to fit with are cropped.
    """

    inputs: Tensor
    name: str = "calibration data"
    skipped: tuple[str, ...] = ()
    pictures: Pictures | None = None

    def __len__(self) -> int:
        return len(self.inputs)

    def fit(self) -> Iterator[Tensor]:
        """The samples to fit with, in batches of at most ``BATCH``, but ``LEAST_BATCHES`` of them where there are enough."""
        return self._batches(self.fit_positions())

    def held_out(self, batch: int | None = None) -> Iterator[Tensor]:
        """The held-out samples, in batches of this size, or else as ``fit`` gives them."""
        return self._batches(self._held_out_positions(), batch)

    def without_held_out(self) -> "Samples":
        """The samples to fit with, as samples that are split again."""
        return Samples(self.inputs[self.fit_positions()], self.name, self.skipped)

    def to_view(self) -> Pictures:
        """The images to crop for reconstruction."""
        return Pictures.of_inputs(self.inputs[self.fit_positions()]) if self.pictures is None else self.pictures

    def fit_positions(self) -> list[int]:
        """The numbers of the samples to fit with."""
        return sorted(set(range(len(self))) - set(self._held_out_positions()))

    @property
    def held_out_count(self) -> int:
        """How many samples are held out."""
        return len(self._held_out_positions())

    def _held_out_positions(self) -> range:
        return range(max(min(HELD_OUT_EVERY, len(self)) - 1, 0), len(self), HELD_OUT_EVERY)

    def _batches(self, positions: Sequence[int], size: int | None = None) -> Iterator[Tensor]:
        size = size or max(1, min(BATCH, len(positions) // LEAST_BATCHES))
        return (self.inputs[part] for part in torch.tensor(positions, dtype=torch.int64).split(size))


Data: TypeAlias = Samples | Tensor | Iterable[object] | Dataset[Any]
"""The data that ``samples_of`` accepts."""


def samples_of(data: Data, *, count: int | None = None, shape: tuple[int, ...] | None = None) -> Samples:
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
    if not isinstance(data, Samples):
        data = Samples(data if isinstance(data, Tensor) else _gathered(data, wanted, shape))
    samples = replace(data, inputs=data.inputs[:wanted].detach())
    _check(samples, shape)
    if len(samples) < (count or 2):
        asked = f"{count} were asked for" if count else "at least 2 are needed"
        raise DataError(f"{samples.name}: {asked} and there are {len(samples)} samples")
    return samples


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
        parts.append(batch)
        found += len(batch)
        if found >= wanted:
            break
    if not parts:
        raise DataError("the calibration data hold no samples")
    return torch.cat(parts)


def _items(source: Any) -> Iterable[object]:
    if not isinstance(source, str | bytes):
        if isinstance(source, Iterable):
            return source
        if hasattr(source, "__getitem__") and hasattr(source, "__len__"):  # a Dataset
            return (source[index] for index in range(len(source)))
    raise DataError(f"expected calibration data as a tensor or as batches of tensors, got {source!r}")


def _check(samples: Samples, shape: tuple[int, ...] | None) -> None:
    inputs, name, found = samples.inputs, samples.name, tuple(samples.inputs.shape[1:])
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
