"""What captured graphs take of packed weights as they are, and whether it is still right."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor

from flysurgery.ops.cuda.notes import generation


class Taken:
    """Tensors that graphs read, kept as long as this is, and the parameters that they derive from."""

    def __init__(self) -> None:
        self._kept, self._sources, self._known = list[Tensor](), list[Tensor](), set[int]()
        self._versions, self._addresses = list[int](), list[int]()
        self._generation = generation()

    def add(self, tensors: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        """Graphs read these tensors, which derive from sources as these are now."""
        self._kept += tensors
        for source in sources:
            if id(source) not in self._known:
                self._known.add(id(source))
                self._sources.append(source)
                self._kept.append(source.detach())  # its memory, whose address is not to be given to other values
                self._versions.append(source._version)
                self._addresses.append(source.data_ptr())

    def right(self) -> bool:
        """Whether no source was written to, moved or retyped, as far as PyTorch tells."""
        return (
            self._generation == generation()
            and self._versions == [source._version for source in self._sources]
            and self._addresses == [source.data_ptr() for source in self._sources]
        )


class _Present(threading.local):
    taken: Taken | None = None


_present = _Present()


def present_taken() -> Taken | None:
    """What the graph takes that this thread captures; None where weights that require gradients are packed in the graph itself."""
    return _present.taken


@contextmanager
def taking() -> Iterator[Taken]:
    """Let graphs that this thread captures in the block take packed weights as they are, whether parameters require gradients or not.

    For graphs that are made anew once their ``Taken`` is right no more. It must live as long as they do.
    """
    taken = _present.taken = Taken()
    try:
        yield taken
    finally:
        _present.taken = None
