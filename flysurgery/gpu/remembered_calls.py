"""Calls that replay their earlier launches, as long as nothing has changed that decides the kernels or their arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from math import prod
from typing import TypeVar
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from flysurgery.gpu.kernel import THREAD, Series, current_device, current_stream
from flysurgery.gpu.recording import Address, Recording
from flysurgery.gpu.tensor_map import WORDS, Boxes
from flysurgery.gpu.uncounted_writes import Trust
from flysurgery.torch_state import is_tracing, tf32_allowed

_REMEMBERED = 64
_ALIGNMENT = 512  # that of PyTorch's allocator
Result = TypeVar("Result")
_Key = tuple[object, ...]


class Repeating:
    """Calls of one function of tensors and of the parameters of some modules.

    If a call did nothing but launch kernels, the launches are replayed for operands of the same shapes, strides, dtypes and devices, on
    the same stream and under the same settings, as long as the parameters are the same tensors with the same values. All other calls go
    to the function, and so do calls that are traced, transformed or captured, or that run under autocast.

    Copies and pickles do not contain recordings.
    """

    def __init__(self) -> None:
        self._known: tuple[_Parameters | None, dict[_Key, _Repeated | None]] = None, {}

    def __getstate__(self) -> dict[str, object]:
        return vars(Repeating())

    def __call__(self, run: Callable[..., Result], modules: Callable[[], Iterable[nn.Module]], *operands: Tensor) -> Result | Tensor:
        """``run(*operands)``, or a replay of its launches; ``modules`` gives the modules whose parameters it reads."""
        if not _repeatable(operands):
            return run(*operands)
        parameters, calls = self._known
        if parameters is None or not parameters.same():
            parameters, calls = self._known = _Parameters(modules()), {}
            _holding[id(self)] = self
        key = _key(operands)
        try:  # another thread may clear them
            repeated = calls[key]
        except KeyError:
            return _noted(run, parameters, calls, key, operands)
        return run(*operands) if repeated is None else repeated(*operands)


_holding: WeakValueDictionary[int, Repeating] = WeakValueDictionary()


def forget_moved() -> None:
    """Discard recordings whose parameters have changed since, and with them the memory that these left and what was packed from it."""
    for reference in _holding.valuerefs():  # a list of its own, as other threads may add to the dictionary
        repeating = reference()
        parameters, _ = (None, None) if repeating is None else repeating._known
        if repeating is not None and parameters is not None and not parameters.same():
            repeating._known = None, {}


def _repeatable(operands: tuple[Tensor, ...]) -> bool:
    """Whether a call may be replaced by the replay of another one."""
    return (
        not is_tracing(*operands)
        and _on_current_device(operands[0])
        and THREAD.recording is None
        and not torch._C._is_any_autocast_enabled()
        and not torch.cuda.is_current_stream_capturing()
    )


def _on_current_device(x: Tensor) -> bool:
    return x.is_cuda and x.device.index == current_device()


def _key(operands: tuple[Tensor, ...]) -> _Key:
    """Everything except the parameters that decides what a call launches."""
    x = operands[0]
    looks = [(each.shape, each.stride(), each.dtype, each.device, each.requires_grad, each.data_ptr() % 16) for each in operands]
    tf32 = x.dtype == torch.float32 and tf32_allowed()
    return current_stream(x.device.index), torch.is_grad_enabled(), tf32, *looks


def _noted(
    run: Callable[..., Result], parameters: _Parameters, calls: dict[_Key, _Repeated | None], key: _Key, operands: tuple[Tensor, ...]
) -> Result:
    """Call ``run(*operands)``, and store the recording of its launches; None where it did anything else."""
    with ExitStack() as outside:
        if torch.is_inference_mode_enabled():  # tensors do not count writes in this mode
            outside.enter_context(torch.inference_mode(False))
            outside.enter_context(torch.no_grad())
        recording = outside.enter_context(Recording(operands))
        result = run(*operands)
    if len(calls) >= _REMEMBERED:
        calls.clear()
    if recording.changed:  # the next call is the first that can be repeated
        return result
    address, repeated = recording.address_of(result) if isinstance(result, Tensor) else None, None
    if address is not None and isinstance(result, Tensor) and recording.complete and parameters.have(recording.sources):
        written = {each.memory for launch in recording.launches for each in launch.addresses}
        made = address.memory - len(operands)
        if made >= 0 and address.memory in written and recording.made[made].dtype == result.dtype:
            repeated = _Repeated(recording, len(operands), result, address)
    calls[key] = repeated
    return result


class _Parameters:
    """The parameters and buffers of modules, and whether they are unchanged."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        modules = [*modules]
        self._attributes = [vars(module) for module in modules]
        self._names = [(held, name) for module in modules for held in (module._parameters, module._buffers) for name in held]
        self._tensors = [tensor for held, name in self._names if (tensor := held[name]) is not None]
        self._values = [tensor.detach() for tensor in self._tensors]  # keep their memory from being reused
        self._trust, self._seen = Trust(self._tensors), self._look()

    def have(self, tensors: Iterable[Tensor]) -> bool:
        """Whether all of these are among them."""
        return {id(tensor) for tensor in self._tensors}.issuperset(map(id, tensors))

    def same(self) -> bool:
        """Whether none was written to, moved, retyped or replaced, and no module got another forward."""
        return self._trust.holds(self._tensors) and self._seen == self._look()

    def _look(self) -> object:
        found = [held.get(name) for held, name in self._names]
        tensors = [tensor for tensor in found if tensor is not None]
        try:
            versions = [tensor._version for tensor in tensors]
        except RuntimeError:  # inference tensors count none: equal to nothing
            return object()
        return (
            versions,
            ["forward" in attributes for attributes in self._attributes],
            [*map(id, found)],
            [tensor.data_ptr() for tensor in tensors],
            [tensor.dtype for tensor in tensors],
            [tensor.shape for tensor in tensors],
            [tensor.stride() for tensor in tensors],
            [tensor.requires_grad for tensor in tensors],
        )


class _Repeated:
    """The launches of a complete recording, for other operands. All tensors between the launches share one piece of memory.

    Addresses are offsets from an operand, from that piece, or from the result, in this order. ``address``: that of the recorded result.
    """

    def __init__(self, recording: Recording, operands: int, result: Tensor, address: Address) -> None:
        made = recording.made[address.memory - operands]
        whole = result.is_contiguous() and result.numel() == prod(made.shape)
        self._shape, self._dtype = result.shape if whole else made.shape, made.dtype
        self._view = None if whole else (result.shape, result.stride(), address.offset // result.element_size())
        between, self._bytes = _between(recording, operands, address.memory)
        starts = {number: Address(number, 0) for number in range(operands)}
        starts |= {memory: Address(operands, start) for memory, start in between.items()} | {address.memory: Address(operands + 1, 0)}

        def placed(address: Address) -> Address:
            base, start = starts[address.memory]
            return Address(base, start + address.offset)

        self._constants = recording.constants  # whose addresses stay the same
        self._words = list[int]()
        self._addresses, self._maps = list[tuple[int, Address]](), list[tuple[int, Address, Boxes]]()
        for launch in recording.launches:
            for argument in launch.arguments:
                word = len(self._words)
                if isinstance(argument, Address):
                    self._addresses.append((word, placed(argument)))
                elif isinstance(argument, Boxes):
                    self._maps.append((word, placed(argument.at), argument))
                self._words += [0] * WORDS if isinstance(argument, Boxes) else [argument if isinstance(argument, int) else 0]
        self._series = Series([(launch.kernel, launch.sizes, launch.early) for launch in recording.launches])

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
