"""Compiled kernels by content: from the user's cache folder, or from NVRTC if they are not there."""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Mapping
from pathlib import Path

from flysurgery.gpu.bindings import cuda_module
from flysurgery.gpu.cache_folder import cache_folder, warn_unwritable
from flysurgery.gpu.compile import compile_cubin, cubin_key

SERIALIZED_WARNING = "this NVRTC makes kernel"
"""The beginning of the warning that wgmma instructions wait for each other. Such a kernel is right; autotuning never chooses it."""
_SLOW_SECONDS = 2.0
_MAX_BYTES = 256 << 20


def cubin_folder() -> Path:
    """Where machine code is kept. Least recently read files go first once 256 MiB are reached."""
    return cache_folder() / "kernels"


def find_cubin(source: str, defines: Mapping[str, int | str], *, arch: str, name: str, refresh: bool = False) -> bytes:
    """Machine code of one kernel, compiled at most once a machine, NVRTC version and source text.

    Files are written under another name and renamed, so processes that compile the same kernel at once do not disturb
    each other. If the folder cannot be read or written, there is one warning, and each process compiles for itself. A compilation
    that takes over two seconds says so on stderr. ``refresh`` compiles even where a file is there.

    Raises:
        BackendError: as ``compile_cubin``.
    """
    key = cubin_key(source, defines, arch)
    folder = cubin_folder()
    kept = None
    try:
        kept = cuda_module("core.utils").FileStreamProgramCache(folder, max_size_bytes=_MAX_BYTES)
        cubin = None if refresh else kept.get(key)
    except OSError as error:
        warn_unwritable("compiled kernels", folder, error)
        cubin = None
    if cubin:
        return cubin
    cubin = _compile(source, defines, arch, name)
    if kept is not None:
        try:
            kept[key] = cubin
        except OSError as error:
            warn_unwritable("compiled kernels", folder, error)
    return cubin


def _compile(source: str, defines: Mapping[str, int | str], arch: str, name: str) -> bytes:
    start = time.perf_counter()
    compiled = compile_cubin(source, defines, arch=arch, name=name)
    seconds = time.perf_counter() - start
    if seconds > _SLOW_SECONDS:
        sys.stderr.write(f"flysurgery: compiled kernel {source} for {arch} in {seconds:.1f} s; later runs find it in {cubin_folder()}\n")
    if compiled.serialized:
        warnings.warn(f"{SERIALIZED_WARNING} {source} slower than it should be: {compiled.serialized[0]}", RuntimeWarning, stacklevel=4)
    return compiled.cubin
