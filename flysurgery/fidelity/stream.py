"""The tensors at a model's cuts while it runs: kept, and pulled towards those of another model."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from flysurgery.errors import SurgeryError
from flysurgery.walker import Cut

_Self = TypeVar("_Self", bound="Stream")


class Stream(ExitStack):
    """Keeps the tensors at ``cuts`` of a model's last forward in ``values``, as long as the ``with`` block lasts.

    Hooks on the modules do it; the model and its numbers stay as they are.
    """

    def __init__(self, model: nn.Module, cuts: Sequence[Cut]) -> None:
        super().__init__()
        self.values: dict[int, Tensor] = {}
        self._model, self._cuts = model, cuts

    def __enter__(self: _Self) -> _Self:
        self.callback(self.values.clear)
        for number, cut in enumerate(self._cuts):
            module = self._model.get_submodule(cut.fqn)
            if cut.side == "output":
                self.enter_context(module.register_forward_hook(partial(self._after, number)))
            else:
                self.enter_context(module.register_forward_pre_hook(partial(self._before, number), with_kwargs=True))
        return self

    def _seen(self, number: int, mine: Tensor) -> Tensor | None:
        """Called with each tensor; gives what a module gives in its place, or None to leave it."""

    def _after(self, number: int, module: nn.Module, given: object, output: Any) -> Any:
        tensor, other = self._keep(number, output if isinstance(output, tuple | list) else (output,))
        if other is None:
            return None
        if tensor is output:
            return other
        made = getattr(output, "_make", type(output))  # of a named tuple, a tuple or a list
        return made([other if each is tensor else each for each in output])

    def _before(self, number: int, module: nn.Module, args: Sequence[object], kwargs: Mapping[str, object]) -> None:
        self._keep(number, (*args, *kwargs.values()))  # others may read it too, so nothing takes its place

    def _keep(self, number: int, candidates: Sequence[object]) -> tuple[Tensor, Tensor | None]:
        """Keep the tensor at a cut; gives it, and what goes on in its place."""
        wanted = self._cuts[number].shape
        for tensor in candidates:
            # the batch may differ from the example's, and with it a first side that windows are folded into
            if isinstance(tensor, Tensor) and tensor.ndim == len(wanted) and tensor.shape[1:] == wanted[1:]:
                self.values[number] = tensor.detach()  # which keeps no graph and no activations alive
                return tensor, self._seen(number, tensor)
        cut = self._cuts[number]
        raise SurgeryError(f"{cut.fqn} was traced with an {cut.side} of shape (batch, {', '.join(map(str, wanted[1:]))}) and has none now")


class Pull(Stream):
    """Pulls the blocks of ``student`` towards ``wanted``, the teacher's tensors at ``cuts``, in each forward with gradients.

    This lasts as long as the ``with`` block. A block's error is ``sum|x' - x|² / sum|x - mean x|²`` of the stream after it. Its gradient
    enters at the cut, in the backward pass of whatever loss the forward ends in, and of the gradient from later blocks a share of ``reach``
    passes on: 0 fits each block to its own target alone, 1 is plain distillation of all blocks. The cut of kind "tokens" lets everything
    pass, that of kind "start" nothing: what comes before it is exact, and stays. The blocks' gradients are multiplied by ``weight``.

    Where a module gives the stream after a block, a share of ``taught`` of its entries, drawn at random, are the teacher's, so that no
    block learns to undo what the blocks before it make of few pictures. ``weight`` and ``taught`` may be set at any time, also as tensors
    of one number.
    Source for such a share: X. Wei et al., QDrop, arXiv:2203.05740, for quantization.
    """

    def __init__(self, student: nn.Module, wanted: Mapping[int, Tensor], cuts: Sequence[Cut], reach: float) -> None:
        super().__init__(student, cuts)
        self._wanted, self._reach = wanted, reach
        self.weight: float | Tensor = 1.0
        self.taught: float | Tensor = 0.0
        self._errors: dict[int, Tensor] = {}

    def error(self) -> Tensor:  # shape: ()
        """Give the mean error of the last forward with gradients, and forget the errors."""
        found = torch.stack(list(self._errors.values())).mean() if self._errors else torch.zeros(())
        self._errors.clear()
        return found

    def _seen(self, number: int, mine: Tensor) -> Tensor | None:
        if not (torch.is_grad_enabled() and mine.requires_grad):
            return None
        kind = self._cuts[number].kind
        if kind == "start":
            mine.register_hook(torch.zeros_like)
            return None
        self._errors[number], difference, scale = relative_error(mine.detach(), self._wanted[number])
        reach = 1.0 if kind == "tokens" else self._reach
        mine.register_hook(lambda later: (difference * (self.weight * scale)).to(later.dtype) + reach * later)
        if kind == "tokens" or self._cuts[number].side == "input" or (isinstance(self.taught, float) and self.taught == 0):
            return None
        is_taught = torch.rand(mine.shape, device=mine.device) < self.taught
        return torch.where(is_taught, self._wanted[number].to(mine.dtype), mine)


def relative_error(given: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Give ``sum|y' - y|² / sum|y - mean y|²``, with the mean over all rows, and its gradient to ``given`` as a tensor and a scale.

    The scale is in float32, so that the caller chooses when small numbers are rounded.
    """
    rows, difference = wanted.flatten(0, -2), given - wanted
    of_squares, of_error = (torch.linalg.vector_norm(each, dtype=_wide(each)).square() for each in (rows, difference))
    means = rows.mean(0, dtype=_wide(rows))
    spread = (of_squares - len(rows) * means.square().sum()).float().clamp_min(1e-12)
    return of_error / spread, difference, 2 / spread


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)
