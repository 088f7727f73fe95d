"""Calls that replay their earlier launches, as long as nothing has changed that decides the kernels or their arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import TypeVar
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from flysurgery.gpu.kernel import current_device, current_stream
from flysurgery.gpu.replay.launch_again import Repeated
from flysurgery.gpu.replay.recording import Recording, present_recording, record_launches
from flysurgery.gpu.uncounted_writes import Trust
from flysurgery.torch_state import is_tracing, tf32_allowed

_REMEMBERED = 64
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
        self._known: tuple[_Parameters | None, dict[_Key, Repeated | None]] = None, {}

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
            return self._noted(run, parameters, calls, key, operands)
        return run(*operands) if repeated is None else repeated(*operands)

    def forget_changed(self) -> None:
        """Discard the recordings of calls whose parameters have changed."""
        parameters, _ = self._known
        if parameters is not None and not parameters.same():
            self._known = None, {}

    def _noted(
        self,
        run: Callable[..., Result],
        parameters: _Parameters,
        calls: dict[_Key, Repeated | None],
        key: _Key,
        operands: tuple[Tensor, ...],
    ) -> Result:
        """Call ``run(*operands)``, and store the recording of its launches."""
        with ExitStack() as outside:
            if torch.is_inference_mode_enabled():  # tensors do not count writes in this mode
                outside.enter_context(torch.inference_mode(False))
                outside.enter_context(torch.no_grad())
            with record_launches(operands) as recording:
                result = run(*operands)
        if len(calls) >= _REMEMBERED:
            calls.clear()
        if not recording.changed:  # otherwise the next call is the first that can be repeated
            calls[key] = _repeated(recording, len(operands), result, parameters)
        return result


_holding: WeakValueDictionary[int, Repeating] = WeakValueDictionary()


def forget_moved() -> None:
    """Discard recordings whose parameters have changed since, and with them the memory that these left and what was packed from it."""
    for reference in _holding.valuerefs():
        repeating = reference()
        if repeating is not None:
            repeating.forget_changed()


def _repeatable(operands: tuple[Tensor, ...]) -> bool:
    """Whether a call may be replaced by the replay of another one."""
    return (
        not is_tracing(*operands)
        and _on_current_device(operands[0])
        and present_recording() is None
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


def _repeated(recording: Recording, operands: int, result: object, parameters: _Parameters) -> Repeated | None:
    """The launches of a call; None where it did anything else."""
    address = recording.address_of(result) if isinstance(result, Tensor) else None
    if address is None or not isinstance(result, Tensor) or not recording.complete or not parameters.have(recording.sources):
        return None
    written = {each.memory for launch in recording.launches for each in launch.addresses}
    made = address.memory >= operands and address.memory in written and recording.made[address.memory - operands].dtype == result.dtype
    return Repeated(recording, operands, result, address) if made else None


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
