"""The place where a converted model becomes one with fused modules, once there is a room that makes them."""

from __future__ import annotations

import copy
import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

from torch import nn


def fused_modules(module: nn.Module) -> nn.Module | str:
    """A copy of a converted module with its parts fused for inference, or the reason why there is none."""
    if importlib.util.find_spec("flysurgery.inference") is None:
        return "no: this version has no fused modules"
    optimize: Callable[..., Any] = importlib.import_module("flysurgery.inference").optimize
    fused = optimize(copy.deepcopy(module))
    return fused if isinstance(fused, nn.Module) else module
