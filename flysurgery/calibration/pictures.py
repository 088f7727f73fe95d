"""Pictures of different sizes in one tensor, to take random views of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

SIDES = 2
"""A picture's shorter side is at most so many times the model's input: crops are then seldom made larger."""

ASPECT = 1.5
"""A longer picture is cut to this ratio of its sides, in the middle."""


@dataclass(frozen=True)
class Pictures:
    """Pictures, each in the upper left corner of its part of ``canvas``.

    Attributes:
        canvas: shape (pictures, channels, height, width), uint8, or already normalized floating-point numbers; samples of another
            kind than images have another shape, and are taken as they are.
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
    def of_inputs(cls, inputs: Tensor) -> Pictures:
        """Inputs of a model as they are, shape (samples, *sample): crops are taken of them and made larger."""
        height, width = inputs.shape[-2:] if inputs.ndim == 4 else (0, 0)
        sizes = torch.tensor([[height, width]], dtype=torch.float32).expand(len(inputs), 2)
        return cls(inputs, sizes, (height, width), torch.empty(0), torch.empty(0))

    @classmethod
    def of_images(cls, images: Sequence[Tensor], size: tuple[int, int], mean: Sequence[float], std: Sequence[float]) -> Pictures:
        """Images of shape (channels, height, width) in uint8, of any sizes; the memory is that of the largest sides for each."""
        sizes = torch.tensor([image.shape[-2:] for image in images])
        canvas = torch.zeros(len(images), images[0].shape[0], *sizes.amax(0).tolist(), dtype=torch.uint8)
        for part, image in zip(canvas, images, strict=True):
            part[:, : image.shape[1], : image.shape[2]] = image
        return cls(canvas, sizes.float(), size, torch.tensor(mean), torch.tensor(std))

    def to(self, device: torch.device) -> Pictures:
        """The same pictures on ``device``."""
        names = ("canvas", "sizes", "mean", "std")
        return replace(self, **{name: getattr(self, name).to(device) for name in names})
