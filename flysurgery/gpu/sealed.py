"""Modules that a compiler calls as one operator instead of tracing them. Each call of the compiled code runs their Python."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from operator import is_
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from flysurgery.errors import BackendError
from flysurgery.torch_state import is_exporting

_library = torch.library.Library("flysurgery", "FRAGMENT")
_sealed: WeakValueDictionary[int, nn.Module] = WeakValueDictionary()
_found: WeakValueDictionary[int, nn.Module] = WeakValueDictionary()
_numbers = count()


class Seal:
    """The attribute ``seal`` of a module that maps a tensor to one of the same shape and dtype and is called as one operator.

    Graphs hold its parameters and buffers as operands, not the module. The operator finds the module by these. So one graph serves
    all modules of the same form, and later changes take effect in the next call. Of modules that share all operands it takes the
    youngest. A copy of the module needs a seal of its own.
    """

    def __init__(self, module: nn.Module) -> None:
        # the dictionaries, which stay the same
        self._places = tuple(place for each in module.modules() for place in (each._parameters, each._buffers) if place)
        _sealed[next(_numbers)] = module
        _found.clear()

    def tensors(self) -> list[Tensor]:
        """The module's parameters and buffers as they are now."""
        return [tensor for place in self._places for tensor in place.values() if tensor is not None]

    def consists_of(self, tensors: Sequence[Tensor]) -> bool:
        """Whether these are the module's parameters and buffers."""
        own = self.tensors()
        return len(own) == len(tensors) and all(map(is_, own, tensors))

    def applies(self, x: Tensor) -> bool:
        """Whether a compiler should call the operator: on CUDA, without gradients, autocast or an export."""
        return (
            torch.compiler.is_dynamo_compiling()
            and x.is_cuda
            and not is_exporting()
            and not torch.is_autocast_enabled("cuda")
            and not (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (x, *self.tensors())))
        )

    def __call__(self, x: Tensor) -> Tensor:
        """The result of the module's ``forward``, computed by the operator.

        Raises:
            BackendError: at run time, if the module's parameters were replaced by others, or the shape or dtype differs.
        """
        return torch.ops.flysurgery.sealed(x, self.tensors())


def _run(x: Tensor, tensors: Sequence[Tensor]) -> Tensor:
    y = _module_of(tensors).forward(x)
    if y.shape != x.shape or y.dtype != x.dtype:
        raise BackendError(f"a fused block was compiled to give {tuple(x.shape)} of {x.dtype}, and gives {tuple(y.shape)} of {y.dtype}")
    return y.contiguous()


def _module_of(tensors: Sequence[Tensor]) -> Any:
    first = id(tensors[0])
    module: Any = _found.get(first)
    if module is None or not module.seal.consists_of(tensors):
        youngest: list[Any] = [*_sealed.values()][::-1]
        module = next((each for each in youngest if each.seal.consists_of(tensors)), None)
        if module is None:
            raise BackendError(
                "a compiled graph expects a fused block's own parameters, and got others; call flysurgery.restore(model), and compile anew"
            )
        _found[first] = module
    return module


def _fake(x: Tensor, tensors: Sequence[Tensor]) -> Tensor:
    return x.new_empty(x.shape)


_library.define("sealed(Tensor x, Tensor[] tensors) -> Tensor")
_library.impl("sealed", _run, "CUDA")
_library.impl("sealed", torch.library.fallthrough_kernel, "Autograd")
torch.library.register_fake("flysurgery::sealed", _fake, lib=_library)
