"""Views of pictures to fit with: random crops, mirrored and mixed, made on the device that fits, and where it finds the pictures."""

import math
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional

from flysurgery.calibration import Pictures

LEAST_AREA, LEAST_AREA_VARIED = 0.25, 0.1  # the least share of a picture's largest square that a crop keeps, with a variety of 0 and of 1
MIXED, MIXED_VARIED = 0.25, 0.5  # the share of views that are two in one, likewise
RATIO = 4 / 3  # the largest ratio of a crop's sides
SHARE = 0.25  # the share of a device's free memory up to which pictures stay there
SATURATION, CONTRAST, BRIGHTNESS, TINT = 0.6, 0.3, 0.3, 0.2  # a variety of 1 multiplies by 1 ± the first two, and adds ± the others
OFTEN = 1000
"""Views of one picture from which the variety is 1. In a pair of trials with some 1180 views of each, a variety of 1 gains .003 of the
class token and of the patch tokens over 0. Nothing between was tried."""


def views(pictures: Pictures, chosen: Tensor, varied: float = 0.0) -> Tensor:  # shapes: (batch,), (batch, channels, height, width)
    """Make one random view of each of the ``chosen`` pictures, as the model takes it, in float32.

    Half of all crops are mirrored. A quarter of all views are two in one, mixed by a random shape with a soft outline: few pictures then
    make many. ``varied``, from 0 to 1, makes smaller crops, more mixtures and other colours. Draws from the device's generator. Samples
    that are no images are given as they are.
    """
    image = crops(pictures, chosen, LEAST_AREA + varied * (LEAST_AREA_VARIED - LEAST_AREA))
    if image.ndim != 4:
        return image
    noise = torch.randn(len(chosen), 1, 4, 4, device=chosen.device)
    outline = functional.interpolate(noise, pictures.size, mode="bicubic", align_corners=False).mul(8).sigmoid()
    is_mixed = torch.rand(len(chosen), 1, 1, 1, device=chosen.device) < MIXED + varied * (MIXED_VARIED - MIXED)
    share = torch.where(is_mixed, outline, torch.ones_like(outline))
    image = share * image + (1 - share) * image.roll(1, 0)
    drawn = varied * (2 * torch.rand(4, len(image), image.shape[1], 1, 1, device=image.device) - 1)
    gray = image.mean(1, keepdim=True)
    saturated = gray + (image - gray) * (1 + SATURATION * drawn[0, :, :1])
    return saturated * (1 + CONTRAST * drawn[1, :, :1]) + BRIGHTNESS * drawn[2, :, :1] + TINT * drawn[3]


def crops(pictures: Pictures, chosen: Tensor, least: float) -> Tensor:  # shapes: (batch,), (batch, channels, height, width)
    """Cut a random piece out of each of the ``chosen`` pictures, of at least this share of its largest square; half are mirrored."""
    if pictures.canvas.ndim != 4:
        return pictures.canvas[chosen].float()
    height, width = pictures.size
    drawn = torch.rand(5, len(chosen), 1, device=chosen.device)
    sides = pictures.sizes[chosen]  # shape: (batch, 2)
    side = sides.amin(1, keepdim=True) * (least + (1 - least) * drawn[0]).sqrt()
    ratio = (math.log(RATIO) * (drawn[1] - 0.5)).exp()
    rows = _positions(side * ratio * height / max(height, width), sides[:, :1], drawn[2], height)
    columns = _positions(side / ratio * width / max(height, width), sides[:, 1:], drawn[3], width)
    columns = torch.where(drawn[4] < 0.5, columns.flip(1), columns)
    found = pictures.canvas[chosen[:, None, None], :, rows[:, :, None], columns[:, None, :]].movedim(-1, 1)
    image = functional.avg_pool2d(found.float(), 2)
    if pictures.canvas.is_floating_point():
        return image
    return (image / 255 - pictures.mean.view(1, -1, 1, 1)) / pictures.std.view(1, -1, 1, 1)


def _positions(length: Tensor, whole: Tensor, start: Tensor, points: int) -> Tensor:
    """Place ``2 * points`` samples at even distances along a stretch of ``length`` at a random place of ``whole``."""
    length = torch.minimum(length, whole)
    steps = (torch.arange(2 * points, device=length.device) + 0.5) / (2 * points)
    at = start * (whole - length) + steps * length
    return torch.minimum(at.floor(), whole - 1).long()


class Source:
    """Draws random views of pictures on ``device``. Where the pictures do not fit there, those of each batch are copied."""

    def __init__(self, pictures: Pictures, batch: int, device: torch.device) -> None:
        is_there = device.type != "cuda" or pictures.canvas.device == device
        self._fits = is_there or pictures.canvas.nbytes < SHARE * torch.cuda.mem_get_info(device)[0]
        self._pictures, self._batch, self._device = pictures.to(device) if self._fits else pictures, batch, device
        self._varied = 0.0

    def expect(self, count: int) -> None:
        """Set how much the views of a picture differ, by how many views of all pictures there will be: fully from ``OFTEN`` of each on."""
        self._varied = min(1.0, count / len(self._pictures) / OFTEN)

    def draw(self) -> Tensor:  # shape: (batch, channels, height, width)
        """Make one view of each of some pictures that are drawn at random."""
        pictures = self._pictures
        chosen = torch.randint(0, len(pictures), (self._batch,), device=pictures.canvas.device)
        if not self._fits:
            pictures = replace(pictures, canvas=pictures.canvas[chosen], sizes=pictures.sizes[chosen]).to(self._device)
            chosen = torch.arange(self._batch, device=self._device)
        return views(pictures, chosen, self._varied)
