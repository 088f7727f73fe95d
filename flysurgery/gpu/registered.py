"""Operators of this package: registered with PyTorch for graphs and modes, and plain functions otherwise."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch._library.autograd import Info, make_autograd_impl

from flysurgery.gpu.kernel import current_device
from flysurgery.torch_state import is_tracing

_library = torch.library.Library("flysurgery", "FRAGMENT")


Result = TypeVar("Result")


class Operator(Generic[Result]):
    """A function of CUDA tensors that graphs, compilers and dispatch modes see as one operator of PyTorch's.

    Without graphs, compilers and modes it does not use the dispatcher, which costs more than many launches do.

    Args:
        schema: as ``torch.library`` takes it, the name first, without a namespace.
        run: computes it, with the device of x as the current one.
        fake: gives empty tensors of the result's shape, dtype and layout for x and the other operands, by their names in the schema.
    """

    def __init__(self, schema: str, run: Callable[..., Result], fake: Callable[[Tensor, Any], Result]) -> None:
        name = schema.partition("(")[0]
        _, *names = [operand.partition("=")[0].split()[-1] for operand in schema[len(name) + 1 : schema.index(")")].split(", ")]

        def on_device(x: Tensor, *others: Any) -> Result:
            index = x.device.index
            if index == current_device():
                return run(x, *others)
            with torch.cuda.device(index):
                return run(x, *others)

        _library.define(schema)
        _library.impl(name, on_device, "CUDA")
        torch.library.register_fake(
            f"flysurgery::{name}", lambda x, *others: fake(x, SimpleNamespace(**dict(zip(names, others, strict=False)))), lib=_library
        )
        self.run, self.registered = on_device, getattr(torch.ops.flysurgery, name)

    def __call__(self, x: Tensor, *others: object) -> Result:
        """The function of x and others, which are plain tensors where x is one: ``common_obstacle`` refuses the rest."""
        return self.registered(x, *others) if is_tracing(x) else self.run(x, *others)


def rows_like(x: Tensor, features: int) -> Tensor:
    """Empty rows of this many features, as many as x has, with its leading dimensions."""
    return x.new_empty((*x.shape[:-1], features))


def define_differentiable(
    schema: str,
    run: Callable[..., Any],
    fake: Callable[..., Any],
    differentiate: Callable[..., Any],
    remember: Callable[..., None] | None = None,
) -> None:
    """Define an operator with gradients.

    Below autograd, as in the passes of a compiled graph, a second operator of the same schema, ``NAME_launched``, replaces it. It has no
    gradients, so the dispatcher calls its kernel directly. Asking Python for gradients first takes as long as several launches.

    Args:
        schema: as ``torch.library`` takes it, the name first, without a namespace.
        run: computes it.
        fake: gives empty tensors of the result's shape, dtype and layout.
        differentiate: its backward pass, as ``torch.library.register_autograd`` takes it.
        remember: fills the context for it.
    """
    name = schema.partition("(")[0]
    twin = f"{name}_launched"
    for own in (name, twin):
        _library.define(own + schema.removeprefix(name))
        _library.impl(own, run, "CUDA")
        torch.library.register_fake(f"flysurgery::{own}", fake, lib=_library)
    _library.impl(twin, torch.library.fallthrough_kernel, "Autograd")
    with_gradients = make_autograd_impl(getattr(torch.ops.flysurgery, twin).default, Info(differentiate, remember))
    _library.impl(name, with_gradients, "Autograd", with_keyset=True)
