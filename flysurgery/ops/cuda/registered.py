"""Operators of our own: PyTorch's wherever something watches or traces, else plain functions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch._library.autograd import Info, make_autograd_impl

from flysurgery.ops.problem import is_tracing

_library = torch.library.Library("flysurgery", "FRAGMENT")


Result = TypeVar("Result")


class Operator(Generic[Result]):
    """A function of CUDA tensors that graphs, compilers and dispatch modes see as one operator of PyTorch's.

    Called where nothing of that kind is there, it does without the dispatcher, which costs more than many a launch.

    Args:
        schema: as ``torch.library`` takes it, the name first, without a namespace.
        run: computes it.
        fake: gives empty tensors of the result's shape, dtype and layout.
    """

    def __init__(self, schema: str, run: Callable[..., Result], fake: Callable[..., Result]) -> None:
        name = schema.partition("(")[0]
        _library.define(schema)
        _library.impl(name, run, "CUDA")
        torch.library.register_fake(f"flysurgery::{name}", fake, lib=_library)
        self.run, self.registered = run, getattr(torch.ops.flysurgery, name)

    def __call__(self, x: Tensor, *others: object) -> Result:
        """The function of x and others, which are plain tensors where x is one: ``common_obstacle`` refuses the rest."""
        return self.registered(x, *others) if is_tracing(x) else self.run(x, *others)


def register_gradients(
    name: str, run: Callable[..., Any], differentiate: Callable[..., Any], remember: Callable[..., None] | None = None
) -> None:
    """Give an operator of this library gradients, as ``torch.library.register_autograd`` does.

    CUDA tensors of which no gradient is asked and nobody traces, as in the passes of a compiled graph, go to ``run`` at once: to go
    through the dispatcher once more takes as long as several launches.

    Args:
        run: what computes the operator on CUDA.
        differentiate: its backward pass.
        remember: what fills the context for it.
    """
    torch.library.register_autograd(f"flysurgery::{name}", differentiate, setup_context=remember, lib=_library)
    with_gradients = make_autograd_impl(getattr(torch.ops.flysurgery, name).default, Info(differentiate, remember))

    def at_once(keys: Any, *arguments: Any) -> Any:
        if torch.is_grad_enabled() or is_tracing(*_tensors(arguments)):
            return with_gradients(keys, *arguments)
        return run(*arguments)

    _library.impl(name, at_once, "AutogradCUDA", with_keyset=True)


def _tensors(arguments: Iterable[Any]) -> Iterator[Tensor]:
    for argument in arguments:
        if isinstance(argument, Tensor):
            yield argument
        elif isinstance(argument, (list, tuple)):
            yield from argument
