"""Operators of our own: PyTorch's wherever something watches or traces, else plain functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

import torch
from torch import Tensor

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
