"""The place where a converted model becomes one with fused modules, once there is a room that makes them."""

from __future__ import annotations

import copy
import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn


def fused_modules(module: nn.Module, x: Tensor) -> nn.Module | str:
    """A copy of a converted module with its parts fused for inputs like x, or the reason why there is none."""
    if importlib.util.find_spec("flysurgery.inference") is None:
        return "no: this version has no fused modules"
    optimize: Callable[..., Any] = importlib.import_module("flysurgery.inference").optimize
    fused = copy.deepcopy(module)
    optimize(fused, x)  # in place
    return fused
