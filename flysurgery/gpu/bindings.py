"""The parts of cuda-core and cuda-bindings that are used, imported on first use."""

from __future__ import annotations

import functools
import importlib
from typing import Any

from flysurgery.errors import BackendError


@functools.cache
def cuda_module(name: str) -> Any:
    """Import ``cuda.<name>``: ``core``, ``core.utils``, ``bindings.driver`` or ``bindings.nvrtc``.

    Raises:
        BackendError: it is not installed.
    """
    try:
        return importlib.import_module(f"cuda.{name}")
    except ImportError as error:
        raise BackendError(f"the Python package cuda-core is missing or broken ({error}); install cuda-core") from error


@functools.cache
def nvrtc_version() -> tuple[int, int]:
    """Version of NVRTC.

    Raises:
        BackendError: it or cuda-core is not installed.
    """
    nvrtc = cuda_module("bindings.nvrtc")
    try:
        _, major, minor = nvrtc.nvrtcVersion()
    except RuntimeError as error:
        raise BackendError(f"the compiler library NVRTC cannot be loaded ({error}); install a CUDA build of PyTorch") from error
    return (major, minor)
