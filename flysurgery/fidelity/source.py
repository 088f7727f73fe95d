"""Where an update finds its pictures: on the device, or brought there batch by batch."""

from __future__ import annotations

import torch
from torch import Tensor

from flysurgery.calibration import Pictures

SHARE = 0.25
"""Of the free memory of a device that pictures may take up to stay there."""


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
