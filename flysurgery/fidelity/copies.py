"""Copies of a model: of its values, to go back to, and in bfloat16, to work with."""

# pyright: reportPrivateImportUsage=false
from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn


class Copied:
    """The parameters and buffers of ``model`` as they are now; where weights are shared out, this process's parts of them."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._values = [each.clone() for each in _tensors(model)]

    @torch.no_grad()
    def take(self) -> None:
        for mine, theirs in zip(self._values, _tensors(self._model), strict=True):
            mine.copy_(theirs)

    @torch.no_grad()
    def put_back(self) -> None:
        for mine, theirs in zip(self._values, _tensors(self._model), strict=True):
            theirs.copy_(mine)

    def save(self, file: Path) -> None:
        torch.save([each.cpu() for each in self._values], file)

    def load(self, file: Path) -> None:
        for mine, kept in zip(self._values, torch.load(file, weights_only=True), strict=True):
            mine.copy_(kept)


def _tensors(model: nn.Module) -> list[Tensor]:
    tensors: list[Any] = [*model.parameters(), *model.buffers()]
    return [(each.to_local() if hasattr(each, "to_local") else each).detach() for each in tensors]


class HalfCopy:
    """A copy of ``original`` in bfloat16 that does the work of an update, while the original's parameters take the step.

    It takes half the memory traffic of autocast, which casts weights at every use.
    """

    def __init__(self, original: nn.Module) -> None:
        self.model = copy.deepcopy(original).bfloat16()
        self._theirs, self._mine = learning(original), learning(self.model)

    def give_gradients(self) -> None:
        """Move the gradients to the original's parameters, in their dtype."""
        pairs = zip(self._theirs, self._mine, strict=True)
        used = [(theirs, mine, mine.grad) for theirs, mine in pairs if mine.grad is not None]
        gradients = [torch.empty_like(theirs) for theirs, _, _ in used]
        torch._foreach_copy_(gradients, [gradient for _, _, gradient in used])
        for (theirs, mine, _), gradient in zip(used, gradients, strict=True):
            theirs.grad, mine.grad = gradient, None

    @torch.no_grad()
    def take_values(self) -> None:
        """Take the values of the original's parameters that learn."""
        torch._foreach_copy_(self._mine, self._theirs)


def learning(model: nn.Module) -> list[Tensor]:
    """List the parameters that require gradients."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


@torch.no_grad()
def precision(models: Sequence[nn.Module], x: Tensor) -> AbstractContextManager[object]:
    """Choose what to run models in bfloat16 under: nothing, or autocast where a forward mixes dtypes and fails without it."""
    try:
        for model in models:
            model(x)
    except RuntimeError:
        return torch.autocast(x.device.type, torch.bfloat16)
    return nullcontext()
