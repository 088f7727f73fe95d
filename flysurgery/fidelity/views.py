"""Views of pictures to fit with: random crops, mirrored and mixed, made on the device that fits, and where it finds the pictures."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from flysurgery.calibration import Pictures

LEAST_AREA = 0.25
"""The least share of a picture's largest square that a crop keeps."""

RATIO = 4 / 3
"""The largest ratio of a crop's sides."""

SHARE = 0.25
"""The share of a device's free memory up to which pictures stay there."""


def views(
    pictures: Pictures,
    chosen: Tensor,  # shape: (batch,)
    *,
    mixed: float = 0.0,
) -> Tensor:  # shape: (batch, channels, height, width)
    """Make one random view of each of the ``chosen`` pictures, as the model takes it, in float32; of a share ``mixed`` of them two in one.

    A crop keeps at least ``LEAST_AREA`` of the picture's largest square, and half of all crops are mirrored. Two views are mixed by a
    random shape with a soft outline: few pictures then make many. Draws from the device's generator; no shape depends on what
    is drawn, so a CUDA graph can replay it. Samples that are no images are given as they are.
    """
    if pictures.canvas.ndim != 4:
        return pictures.canvas[chosen].float()
    device, (height, width) = chosen.device, pictures.size
    drawn = torch.rand(6, len(chosen), 1, device=device)
    sides = pictures.sizes[chosen]  # shape: (batch, 2)
    side = sides.amin(1, keepdim=True) * (LEAST_AREA + (1 - LEAST_AREA) * drawn[0]).sqrt()
    ratio = (math.log(RATIO) * (drawn[1] - 0.5)).exp()
    rows = _positions(side * ratio * height / max(height, width), sides[:, :1], drawn[2], height)
    columns = _positions(side / ratio * width / max(height, width), sides[:, 1:], drawn[3], width)
    columns = torch.where(drawn[4] < 0.5, columns.flip(1), columns)
    found = pictures.canvas[chosen[:, None, None], :, rows[:, :, None], columns[:, None, :]].movedim(-1, 1)
    image = functional.avg_pool2d(found.float(), 2)
    if not pictures.canvas.is_floating_point():
        image = (image / 255 - pictures.mean.view(1, -1, 1, 1)) / pictures.std.view(1, -1, 1, 1)
    if not mixed:
        return image
    noise = torch.randn(len(chosen), 1, 4, 4, device=device)
    outline = functional.interpolate(noise, (height, width), mode="bicubic", align_corners=False).mul(8).sigmoid()
    share = torch.where(drawn[5][..., None, None] < mixed, outline, torch.ones_like(outline))
    return share * image + (1 - share) * image.roll(1, 0)


def _positions(length: Tensor, whole: Tensor, start: Tensor, points: int) -> Tensor:
    """Place ``2 * points`` samples at even distances along a stretch of ``length`` at a random place of ``whole``."""
    length = torch.minimum(length, whole)
    steps = (torch.arange(2 * points, device=length.device) + 0.5) / (2 * points)
    at = start * (whole - length) + steps * length
    return torch.minimum(at.floor(), whole - 1).long()


class Source:
    """Draws pictures at random. Where they do not fit on the device, each batch is copied into memory that stays in one place."""

    def __init__(self, pictures: Pictures, batch: int, device: torch.device) -> None:
        self._all, self._batch, self._device = pictures, batch, device
        self._stays = pictures.canvas.device == device or device.type != "cuda" or _fits(pictures, device)
        self._here = pictures.to(device) if self._stays else self._taken().to(device)

    def advance(self) -> None:
        """Bring the next batch, where the pictures are not all here; called before each update, outside of a graph."""
        if not self._stays:
            fresh = self._taken()
            self._here.canvas.copy_(fresh.canvas)
            self._here.sizes.copy_(fresh.sizes)

    def draw(self) -> tuple[Pictures, Tensor]:
        """Pictures on the device, and which of them to look at, shape (batch,)."""
        if self._stays:
            return self._here, torch.randint(0, len(self._here), (self._batch,), device=self._device)
        return self._here, torch.arange(self._batch, device=self._device)

    def _taken(self) -> Pictures:
        chosen = torch.randint(0, len(self._all), (self._batch,))
        return Pictures(self._all.canvas[chosen], self._all.sizes[chosen], self._all.size, self._all.mean, self._all.std)


def _fits(pictures: Pictures, device: torch.device) -> bool:
    free, _ = torch.cuda.mem_get_info(device)
    return pictures.canvas.nbytes < SHARE * free
