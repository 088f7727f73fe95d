"""A copy of a model in bfloat16 that does the work of an update, while the parameters that learn stay as they are."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from flysurgery.fidelity import foreach


class HalfCopy:
    """A copy of ``original`` in bfloat16. It takes half the memory traffic of autocast, which casts weights at every use."""

    def __init__(self, original: nn.Module) -> None:
        self.model = copy.deepcopy(original).bfloat16()
        self._theirs, self._mine = learning(original), learning(self.model)

    def give_gradients(self) -> None:
        """Move the gradients to the original's parameters, in their dtype."""
        pairs = zip(self._theirs, self._mine, strict=True)
        used = [(theirs, mine, mine.grad) for theirs, mine in pairs if mine.grad is not None]
        gradients = [torch.empty_like(theirs) for theirs, _, _ in used]
        foreach.copy_(gradients, [gradient for _, _, gradient in used])
        for (theirs, mine, _), gradient in zip(used, gradients, strict=True):
            theirs.grad, mine.grad = gradient, None

    @torch.no_grad()
    def take_values(self) -> None:
        """Take the values of the original's parameters that learn."""
        foreach.copy_(self._mine, self._theirs)


def learning(model: nn.Module) -> list[Tensor]:
    """The parameters that require gradients."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


@torch.no_grad()
def precision(models: Sequence[nn.Module], x: Tensor) -> AbstractContextManager[object]:
    """What to run models in bfloat16 under: nothing, or autocast where a forward mixes dtypes and fails without it."""
    try:
        for model in models:
            model(x)
    except RuntimeError:
        return torch.autocast(x.device.type, torch.bfloat16)
    return nullcontext()
