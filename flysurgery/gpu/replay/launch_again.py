"""Replays the launches of a recorded call for operands of the same shapes."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from flysurgery.gpu.kernel import Kernel, Series, current_stream
from flysurgery.gpu.replay.recording import Address, Recording
from flysurgery.gpu.tensor_map import WORDS, Boxes

_ALIGNMENT = 512  # that of PyTorch's allocator


class Repeated:
    """The launches of a call, for other operands. All tensors between the launches share one piece of memory.

    Addresses are offsets from an operand, from that piece, or from the result, in this order.

    Args:
        recording: a complete one.
        operands: how many there are.
        result: the result of the call.
        place: where it lies in memory that the call allocated.
    """

    def __init__(self, recording: Recording, operands: int, result: Tensor, address: Address) -> None:
        made = recording.made[address.memory - operands]
        whole = result.is_contiguous() and result.numel() == prod(made.shape)
        self._shape, self._dtype = result.shape if whole else made.shape, made.dtype
        self._view = None if whole else (result.shape, result.stride(), address.offset // result.element_size())
        between, self._bytes = _between(recording, operands, address.memory)
        self._starts = {number: Address(number, 0) for number in range(operands)}
        self._starts |= {memory: Address(operands, start) for memory, start in between.items()} | {address.memory: Address(operands + 1, 0)}
        self._constants = recording.constants  # whose addresses stay the same
        self._words = list[int]()
        self._addresses, self._maps = list[tuple[int, Address]](), list[tuple[int, Address, Boxes]]()
        launches = list[tuple[Kernel, tuple[int, ...], bool, int]]()
        for launch in recording.launches:
            launches.append((launch.kernel, launch.sizes, launch.early, len(self._words)))
            self._add(launch.arguments)
        self._series = Series(launches, len(self._words))

    def _add(self, arguments: Sequence[Address | Boxes | int | None]) -> None:
        """Add a launch's arguments to the table."""
        for argument in arguments:
            word = len(self._words)
            if isinstance(argument, Address):
                self._addresses.append((word, self._at(argument)))
            elif isinstance(argument, Boxes):
                self._maps.append((word, self._at(argument.at), argument))
            self._words += [0] * WORDS if isinstance(argument, Boxes) else [argument if isinstance(argument, int) else 0]

    def _at(self, address: Address) -> Address:
        base, start = self._starts[address.memory]
        return Address(base, start + address.offset)

    def __call__(self, *operands: Tensor) -> Tensor:
        """Launch them on the current stream."""
        device = operands[0].device
        result = torch.empty(self._shape, dtype=self._dtype, device=device)
        between = torch.empty(self._bytes, dtype=torch.uint8, device=device) if self._bytes else result
        bases = [tensor.data_ptr() for tensor in (*operands, between, result)]
        words = self._words.copy()
        for word, (base, offset) in self._addresses:
            words[word] = bases[base] + offset
        for word, (base, offset), boxes in self._maps:
            words[word : word + WORDS] = boxes.words(bases[base] + offset)
        self._series(current_stream(device.index), *words)
        return result if self._view is None else result.as_strided(*self._view)


def _between(recording: Recording, operands: int, result: int) -> tuple[dict[int, int], int]:
    """The offsets, in one piece of memory, of all that the call allocated besides its result, and the size of that piece.

    Memory that no later launch reads is used again for what a later launch writes.
    """
    used: dict[int, list[int]] = {}
    for number, launch in enumerate(recording.launches):
        for address in launch.addresses:
            used.setdefault(address.memory, []).append(number)
    starts, taken = dict[int, int](), list[tuple[int, int, range]]()
    for memory, (first, *others) in used.items():
        if memory < operands or memory == result:
            continue
        made, last, start = recording.made[memory - operands], max(others, default=first), 0
        size = -(-prod(made.shape) * made.dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
        for begun, ended, there in sorted(taken, key=lambda each: each[2].start):
            if begun <= last and first <= ended and there.start < start + size and start < there.stop:
                start = there.stop
        starts[memory] = start
        taken.append((first, last, range(start, start + size)))
    return starts, max((there.stop for _, _, there in taken), default=0)
