"""Operators of our own: PyTorch's wherever something watches or traces, else plain functions."""

from __future__ import annotations

from collections.abc import Callable
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


def define_differentiable(
    schema: str,
    run: Callable[..., Any],
    fake: Callable[..., Any],
    differentiate: Callable[..., Any],
    remember: Callable[..., None] | None = None,
) -> None:
    """Define an operator with gradients.

    What is below autograd, as the passes of a compiled graph, holds its twin of the same schema, ``NAME_launched``, which knows of no
    gradients: the dispatcher goes to its kernel at once, where to ask Python for gradients first takes as long as several launches.

    Args:
        schema: as ``torch.library`` takes it, the name first, without a namespace.
        run: computes it.
        fake: gives empty tensors of the result's shape, dtype and layout.
        differentiate: its backward pass, as ``torch.library.register_autograd`` takes it.
        remember: what fills the context for it.
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
