"""How a fused operation is computed: stages of launches, chosen once for operands of the same shapes, or why no kernel takes it."""

from collections.abc import Callable, Hashable, Sequence
from operator import attrgetter
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from flysurgery.errors import BackendError
from flysurgery.gpu.device import device_obstacle
from flysurgery.gpu.kernel import current_device
from flysurgery.gpu.modes import DTYPE_NUMBERS
from flysurgery.ops.choose_backend import BACKENDS
from flysurgery.torch_state import autocast_dtype, is_tracing, tf32_allowed

Found = TypeVar("Found")

_REMEMBERED = 4096
_requires_grad, _looks = attrgetter("requires_grad"), attrgetter("shape", "dtype", "device")
_decided: dict[tuple[Hashable, ...], object] = {}


class Stage(NamedTuple):
    """One or more launches of an operation. An operation is a list of stages; each receives the result of the stage before.

    ``run`` takes that result, the operation's x, and the operation. It holds no tensors, because stages are remembered.
    """

    launches: tuple[str, ...]
    run: Callable[[Tensor, Tensor, Any], Tensor]


Stages = tuple[Stage, ...]


class Operation(Protocol):
    """A description of what is computed from x: a named tuple of the other operands and the options."""

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All operands but x whose shapes, dtypes and devices decide how it is computed."""
        ...

    @property
    def form(self) -> tuple[Hashable, ...]:
        """A name, which operands are there, and all options: what else decides."""
        ...

    def wrong(self, x: Tensor) -> str | None:
        """Why the sizes of the operands do not fit each other; None where they do."""
        ...

    def stages(self, x: Tensor) -> Stages | str:
        """The fastest stages for operands that fit each other and lie on one CUDA device, or why no kernel takes them."""
        ...

    def plainly(self, x: Tensor) -> Tensor:
        """The result by PyTorch's operators and ``ks_linear``: the definition, on any device, in any dtype, with gradients.

        The fused kernels round less often: they keep sums, norms and activations in float32 between the products.
        """
        ...


class Way(NamedTuple):
    """The stages of an operation, with the operands of one call."""

    stages: Stages
    x: Tensor
    operation: Any

    def launches(self) -> tuple[str, ...]:
        """What the launches compute, one after the other."""
        return tuple(launch for stage in self.stages for launch in stage.launches)

    def run(self) -> Tensor:
        """The operation's result. Its launches need the device of x as the current one."""
        if not is_tracing(self.x) and self.x.is_cuda and self.x.device.index != current_device():
            with torch.cuda.device(self.x.device):
                return self.run()
        y = self.x
        for stage in self.stages:
            y = stage.run(y, self.x, self.operation)
        return y


def way(x: Tensor, operation: Operation) -> Way | str:
    """How kernels compute an operation, or why none takes it. Depends on shapes, dtypes, devices and PyTorch's settings only."""

    def stages() -> Stages | str:
        return _obstacle(x, operation) or operation.wrong(x) or operation.stages(x)

    found = decided(stages, (x, *operation.tensors), *operation.form)
    return found if isinstance(found, str) else Way(found, x, operation)


def reason(x: Tensor, operation: Operation) -> str | None:
    """Why no kernel takes an operation; None where one does."""
    found = way(x, operation)
    return found if isinstance(found, str) else None


def run(x: Tensor, operation: Operation) -> Tensor:
    """The result of an operation, by kernels. No gradients.

    Raises:
        BackendError: no kernel takes this; the message is what ``reason`` answers.
    """
    found = way(x, operation)
    if isinstance(found, str):
        raise BackendError(found)
    return found.run()


def _obstacle(x: Tensor, operation: Operation) -> str | None:
    """Why no kernel takes tensors of this kind, whatever it computes."""
    tensors = operation.tensors
    if x.device.type != "cuda":
        return f"the fused operators need tensors on a CUDA device, x is on {x.device.type}"
    if any(tensor.device != x.device for tensor in tensors):
        return f"the fused operators need all tensors on {x.device}, where x is"
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (x, *tensors)):
        return "the fused operators have no gradients; call them under torch.inference_mode() or torch.no_grad()"
    if is_tracing(x, *tensors):
        return "the fused operators take plain tensors, outside of compilers, transforms and modes"
    if x.dtype not in DTYPE_NUMBERS:
        return f"the fused operators take float32, float16 and bfloat16, not {x.dtype}"
    return device_obstacle(x.device.index)


def decided(decide: Callable[[], Found], tensors: Sequence[Tensor], *asked: Hashable) -> Found:
    """Give ``decide()``, and remember it, except during tracing, where sizes may be symbols.

    It depends on ``tensors``, all operands with x first, on what is ``asked``, on PyTorch's settings and on the registered backends.
    """
    if is_tracing(*tensors):
        return decide()
    x = tensors[0]
    autocast = autocast_dtype("cuda" if x.is_cuda else x.device.type) if torch._C._is_any_autocast_enabled() else None
    tf32 = (autocast or x.dtype) == torch.float32 and x.is_cuda and tf32_allowed()
    gradients = torch.is_grad_enabled() and any(map(_requires_grad, tensors))
    key = (*asked, autocast, tf32, gradients, *BACKENDS.values(), *map(_looks, tensors))
    try:
        return _decided[key]  # pyright: ignore[reportReturnType] - what was asked tells the type
    except KeyError:
        pass
    found = decide()
    if len(_decided) >= _REMEMBERED:
        _decided.clear()
    _decided[key] = found
    return found
