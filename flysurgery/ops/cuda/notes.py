"""What a call launches, noted while it runs, so that it can be done again for other operands that look the same."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef


class Place(NamedTuple):
    """An address in a call: so many bytes behind that of an operand, or of memory that the call made."""

    memory: int  # operands first, then what was made, in order
    offset: int


class Made(NamedTuple):
    """Memory that a call made."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass
class Launch:
    """One launch. In ``arguments`` places stand for tensors, but for those that stay where they are."""

    kernel: Any  # a Kernel
    sizes: tuple[int, ...]  # grid, block and shared bytes
    arguments: list[Any]
    early: bool

    @property
    def places(self) -> list[Place]:
        """All places in its arguments."""
        found = [argument if isinstance(argument, Place) else getattr(argument, "at", None) for argument in self.arguments]
        return [place for place in found if isinstance(place, Place)]


class Notes:
    """What one call did.

    Attributes:
        complete: false once it did anything that launches alone cannot do again.
        changed: whether it computed what later calls find ready, as packed weights.
    """

    def __init__(self, operands: Sequence[Tensor]) -> None:
        self.complete = len({operand.data_ptr() for operand in operands}) == len(operands)
        self.changed = False
        self.launches: list[Launch] = []
        self.made: list[Made] = []
        self.sources: list[Tensor] = []
        self.constants: list[Tensor] = []
        self._operands = [(operand, _version(operand)) for operand in operands]
        self._memory: dict[int, tuple[StorageWeakRef, int, int]] = {}  # by storage, whose name no other gets while it is referred to

    def make(self, tensor: Tensor) -> None:
        """Memory was made, which launches fill before anything reads it."""
        storage, memory = tensor.untyped_storage(), len(self._operands) + len(self.made)
        self._memory[storage._cdata] = StorageWeakRef(storage), memory, tensor.data_ptr()
        self.made.append(Made(tuple(tensor.shape), tensor.dtype))

    def launch(self, kernel: Any, sizes: tuple[int, ...], arguments: Sequence[Any], early: bool) -> None:
        """A kernel was launched."""
        self.launches.append(Launch(kernel, sizes, [self._placed(argument) for argument in arguments], early))

    def place_of(self, tensor: Tensor) -> Place | None:
        """Where a tensor lies; None where it lies elsewhere, or PyTorch wrote to it."""
        address = tensor.data_ptr()
        for memory, (operand, version) in enumerate(self._operands):
            if address == operand.data_ptr():
                return Place(memory, 0) if _version(operand) == version else None
        _, memory, start = self._memory.get(tensor.untyped_storage()._cdata, (None, -1, 0))
        return None if memory < 0 or _version(tensor) else Place(memory, address - start)

    def _placed(self, argument: Any) -> Any:
        if argument is None or isinstance(argument, int):
            return argument
        if any(argument is each for each in (*self.constants, *self.sources)):
            return argument.data_ptr()
        place = self.place_of(argument if isinstance(argument, Tensor) else argument.at)  # of boxes
        self.complete = self.complete and place is not None
        return place if isinstance(argument, Tensor) else argument._replace(at=place)


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


class _Present(threading.local):
    notes: Notes | None = None


_present = _Present()
_generation = 0


def present_notes() -> Notes | None:
    """The notes that are taken of what this thread does."""
    return _present.notes


@contextmanager
def noting(operands: Sequence[Tensor]) -> Iterator[Notes]:
    """Take notes of what this thread does with these operands in the block."""
    notes = _present.notes = Notes(operands)
    try:
        yield notes
    finally:
        _present.notes = None


def fresh(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """``torch.empty`` for launches to fill."""
    tensor = torch.empty(shape, dtype=dtype, device=device)
    if _present.notes is not None:
        _present.notes.make(tensor)
    return tensor


def rely_on(constants: Sequence[Tensor], sources: Sequence[Tensor] = ()) -> None:
    """Tensors that stay where they are as long as their sources, which are parameters, stay what they are."""
    if _present.notes is not None:
        _present.notes.constants += constants
        _present.notes.sources += sources


def refuse() -> None:
    """Something was done that is not to be done again."""
    if _present.notes is not None:
        _present.notes.complete = False


def note_change() -> None:
    """Something was computed that later calls find ready."""
    if _present.notes is not None:
        _present.notes.changed = True


def generation() -> int:
    """Counts ``forget_notes``."""
    return _generation


def forget_notes() -> None:
    """Let all calls be noted anew."""
    global _generation
    _generation += 1
