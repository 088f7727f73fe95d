"""Modules through ``torch.compile``, as its users call it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

COMPILED = ("compile", "max-autotune")
"""Launches by way of the compiler: with its default mode, and with the one that searches longest."""


def forget_compiled() -> None:
    """Let the compiler start anew: it gives up on code that it has compiled for many models."""
    torch.compiler.reset()


def compiled(module: nn.Module, launch: str) -> Callable[..., Any]:
    """The module, to be compiled at its first call."""
    return torch.compile(module, mode=None if launch == "compile" else "max-autotune")
