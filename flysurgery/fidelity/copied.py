"""A copy of everything that a model holds, here and on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn


class Copied:
    """Parameters and buffers of ``model`` as they are now; where weights are shared out, this process's parts of them."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._values = [each.clone() for each in _tensors(model)]

    @torch.no_grad()
    def take(self) -> None:
        """Copy the model anew."""
        for mine, theirs in zip(self._values, _tensors(self._model), strict=True):
            mine.copy_(theirs)

    @torch.no_grad()
    def put_back(self) -> None:
        """Give the model the copied values."""
        for mine, theirs in zip(self._values, _tensors(self._model), strict=True):
            theirs.copy_(mine)

    def save(self, file: Path) -> None:
        """Write the copy into ``file``."""
        torch.save([each.cpu() for each in self._values], file)

    def load(self, file: Path) -> None:
        """Read what ``save`` wrote."""
        for mine, kept in zip(self._values, torch.load(file, weights_only=True), strict=True):
            mine.copy_(kept)


def _tensors(model: nn.Module) -> list[Tensor]:
    tensors: list[Any] = [*model.parameters(), *model.buffers()]
    return [(each.to_local() if hasattr(each, "to_local") else each).detach() for each in tensors]
