"""Records the launches of a call while it runs, so that they can be replayed for other operands of the same shapes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from flysurgery.gpu.kernel import THREAD


class Address(NamedTuple):
    """An address in a call, as an offset in bytes from an operand, or from memory that the call allocated."""

    memory: int  # operands first, then allocations, in order
    offset: int


class Made(NamedTuple):
    """Memory that a call allocated."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass
class Launch:
    """One launch. In ``arguments``, places replace tensors, except tensors whose address does not change."""

    kernel: Any  # a Kernel
    sizes: tuple[int, ...]  # grid, block and shared bytes
    arguments: list[Any]
    early: bool

    @property
    def addresses(self) -> list[Address]:
        """All addresses in its arguments."""
        found = [argument if isinstance(argument, Address) else getattr(argument, "at", None) for argument in self.arguments]
        return [address for address in found if isinstance(address, Address)]


class Recording:
    """A block whose launches by this thread are recorded.

    Attributes:
        complete: false once the call did anything other than launches, so that launches alone cannot repeat it.
        changed: whether it computed tensors that later calls reuse, such as packed weights.
    """

    def __init__(self, operands: Sequence[Tensor]) -> None:
        self.complete = len({operand.data_ptr() for operand in operands}) == len(operands)
        self.changed = False
        self.launches: list[Launch] = []
        self.made: list[Made] = []
        self.sources: list[Tensor] = []
        self.constants: list[Tensor] = []
        self._operands = [(operand, _version(operand)) for operand in operands]
        self._memory: dict[int, tuple[StorageWeakRef, int, int]] = {}  # by storage, whose id stays unique while it is referenced

    def __enter__(self) -> Recording:
        THREAD.recording = self
        return self

    def __exit__(self, *raised: object) -> None:
        THREAD.recording = None

    def make(self, tensor: Tensor) -> None:
        """Record an allocation, which launches fill before anything reads it."""
        storage, memory = tensor.untyped_storage(), len(self._operands) + len(self.made)
        self._memory[storage._cdata] = StorageWeakRef(storage), memory, tensor.data_ptr()
        self.made.append(Made(tuple(tensor.shape), tensor.dtype))

    def launch(self, kernel: Any, sizes: tuple[int, ...], arguments: Sequence[Any], early: bool) -> None:
        """Record a launch."""
        self.launches.append(Launch(kernel, sizes, [self._by_address(argument) for argument in arguments], early))

    def address_of(self, tensor: Tensor) -> Address | None:
        """The place of a tensor; None where it lies in no recorded memory, or PyTorch wrote to it."""
        address = tensor.data_ptr()
        for memory, (operand, version) in enumerate(self._operands):
            if address == operand.data_ptr():
                return Address(memory, 0) if _version(operand) == version else None
        _, memory, start = self._memory.get(tensor.untyped_storage()._cdata, (None, -1, 0))
        return None if memory < 0 or _version(tensor) else Address(memory, address - start)

    def _by_address(self, argument: Any) -> Any:
        if argument is None or isinstance(argument, int):
            return argument
        if any(argument is each for each in (*self.constants, *self.sources)):
            return argument.data_ptr()
        address = self.address_of(argument if isinstance(argument, Tensor) else argument.at)  # of boxes
        self.complete = self.complete and address is not None
        return address if isinstance(argument, Tensor) else argument._replace(at=address)


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def fresh(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """``torch.empty`` for launches to fill."""
    tensor = torch.empty(shape, dtype=dtype, device=device)
    if THREAD.recording is not None:
        THREAD.recording.make(tensor)
    return tensor


def rely_on(constants: Sequence[Tensor], sources: Sequence[Tensor] = ()) -> None:
    """Record tensors whose addresses stay the same as long as their source parameters do not change."""
    if THREAD.recording is not None:
        THREAD.recording.constants += constants
        THREAD.recording.sources += sources


def mark_changed() -> None:
    """Record that the call computed tensors which later calls reuse."""
    if THREAD.recording is not None:
        THREAD.recording.changed = True
