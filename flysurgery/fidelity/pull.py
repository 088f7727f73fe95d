"""The pull of the dense model's blocks on those of the converted one: gradients that enter between the blocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from flysurgery.fidelity.stream import Stream
from flysurgery.walker import Cut


class Pull(Stream):
    """While the ``with`` block lasts, each forward of ``student`` with gradients is held against
    ``wanted``, the teacher's tensors at ``cuts``.

    A block's error is ``sum|x' - x|² / sum|x - mean x|²`` of the stream after it. Its gradient enters at the cut, in the backward pass of
    whatever loss the forward ends in, and of the gradient that comes from later blocks a share of ``reach`` passes: 0 fits each block to
    its own target alone, 1 is plain distillation of all blocks. The cut of kind "tokens" lets everything pass, that of kind "start"
    nothing: what comes before it is exact, and stays. The blocks' gradients are multiplied by ``weight``, which may be set at any time.
    """

    def __init__(self, student: nn.Module, wanted: Mapping[int, Tensor], cuts: Sequence[Cut], reach: float) -> None:
        super().__init__(student, cuts, self._pull)
        self._wanted, self._reach = wanted, reach
        self.weight: float | Tensor = 1.0
        self._errors: dict[int, Tensor] = {}

    def error(self) -> Tensor:  # shape: ()
        """The mean error of the last forward with gradients; the errors are then forgotten."""
        found = torch.stack(list(self._errors.values())).mean() if self._errors else torch.zeros(())
        self._errors.clear()
        return found

    def _pull(self, number: int, mine: Tensor) -> None:
        if not (torch.is_grad_enabled() and mine.requires_grad):
            return
        kind = self._cuts[number].kind
        if kind == "start":
            mine.register_hook(torch.zeros_like)
            return
        self._errors[number], difference, scale = relative_error(mine.detach(), self._wanted[number])
        reach = 1.0 if kind == "tokens" else self._reach
        mine.register_hook(lambda later: (difference * (self.weight * scale)).to(later.dtype) + reach * later)


def relative_error(given: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """``sum|y' - y|² / sum|y - mean y|²``, with the mean over all rows; and its gradient to ``given`` in two parts, a tensor and a scale.

    The scale is in float32, so that whoever multiplies chooses when small numbers are rounded.
    """
    rows = wanted.flatten(0, -2).float()
    spread = (rows.var(0, correction=0).sum() * len(rows)).clamp_min(1e-12)
    difference = given - wanted
    norm = torch.linalg.vector_norm(difference, dtype=torch.promote_types(difference.dtype, torch.float32))
    return norm.square() / spread, difference, 2 / spread
