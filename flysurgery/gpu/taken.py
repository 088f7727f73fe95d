"""Packed weights that captured graphs read, and whether they are still valid."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor

from flysurgery.gpu.doubt import Trust


class Taken:
    """Tensors that graphs read, held as long as this object lives, and the parameters from which they are derived."""

    def __init__(self) -> None:
        self._kept, self._sources, self._known = list[Tensor](), list[Tensor](), set[int]()
        self._versions, self._addresses = list[int](), list[int]()
        self._trust = Trust(())

    def add(self, tensors: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        """Note that graphs read these tensors, which are derived from the present values of the sources."""
        self._kept += tensors
        for source in sources:
            if id(source) not in self._known:
                self._known.add(id(source))
                self._sources.append(source)
                self._kept.append(source.detach())  # holds its memory, so that no other tensor gets the address
                self._versions.append(source._version)
                self._addresses.append(source.data_ptr())

    def trust(self) -> None:
        """Take all of them as they are now."""
        self._trust = Trust(self._sources)

    def right(self) -> bool:
        """Whether no source was written to, moved or retyped since the block of ``taking``, as far as is known."""
        return (
            self._trust.holds(self._sources)
            and self._versions == [source._version for source in self._sources]
            and self._addresses == [source.data_ptr() for source in self._sources]
        )


class _Present(threading.local):
    taken: Taken | None = None


_present = _Present()


def present_taken() -> Taken | None:
    """The record of the graph that this thread captures; None where the graph itself packs weights that require gradients."""
    return _present.taken


@contextmanager
def taking() -> Iterator[Taken]:
    """Let graphs that this thread captures in the block read packed weights as they are, even if parameters require gradients.

    Use it for graphs that are captured again when their ``Taken`` is no longer valid. It must live as long as the graphs.
    """
    taken = _present.taken = Taken()
    try:
        yield taken
    finally:
        _present.taken = None
        taken.trust()
