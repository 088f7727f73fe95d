"""What a model's tensors are at its cuts, while it runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any

from torch import Tensor, nn

from flysurgery.errors import SurgeryError
from flysurgery.walker import Cut

Seen = Callable[[int, Tensor], None]
"""Called with the number of a cut and its tensor."""


class Stream(AbstractContextManager["Stream"]):
    """Keeps the tensors at ``cuts`` of a model's last forward in ``values``, as long as the ``with`` block lasts.

    ``seen`` is called with each of them. Hooks on the modules do it; the model and its numbers stay as they are.
    """

    def __init__(self, model: nn.Module, cuts: Sequence[Cut], seen: Seen | None = None) -> None:
        self.values: dict[int, Tensor] = {}
        self._model, self._cuts, self._seen = model, cuts, seen
        self._handles: list[Any] = []

    def __enter__(self) -> Stream:
        for number, cut in enumerate(self._cuts):
            module = self._model.get_submodule(cut.fqn)
            if cut.side == "output":
                self._handles.append(module.register_forward_hook(lambda _, __, output, n=number: self._keep(n, output)))
            else:
                hook = lambda _, args, kwargs, n=number: self._keep(n, (*args, *kwargs.values()))  # noqa: E731
                self._handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.values.clear()

    def _keep(self, number: int, given: object) -> None:
        wanted = self._cuts[number].shape
        candidates = given if isinstance(given, tuple | list) else (given,)
        for tensor in candidates:
            # The batch may differ from the example's, and with it a first side that windows are folded into.
            if isinstance(tensor, Tensor) and tensor.ndim == len(wanted) and tensor.shape[1:] == wanted[1:]:
                self.values[number] = tensor.detach()  # which keeps no graph and no activations alive
                if self._seen is not None:
                    self._seen(number, tensor)
                return
        cut = self._cuts[number]
        raise SurgeryError(f"{cut.fqn} was traced with an {cut.side} of shape (batch, {', '.join(map(str, wanted[1:]))}) and has none now")
