"""CUDA C++ to machine code by NVRTC through cuda-core, kept in the user's cache folder. Needs neither a GPU nor nvcc."""

import functools
import hashlib
import importlib
import io
import json
import re
import sys
import threading
import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from flysurgery.errors import BackendError
from flysurgery.gpu.cache_folder import cache_folder, warn_unwritable

SERIALIZED_WARNING = "this NVRTC makes kernel"
"""The beginning of the warning that wgmma instructions wait for each other. Such a kernel is right; autotuning never chooses it."""
_PACKAGE = Path(__file__).resolve().parents[1]
_SERIALIZED = re.compile(r"\(C751\d\)")
_INCLUDE = re.compile(r'^\s*#include "(.+)"', re.MULTILINE)
_KEY_SCHEMA = 2
_SLOW_SECONDS = 2.0
_MAX_BYTES = 256 << 20
_importing = threading.Lock()


@functools.cache
def cuda_module(name: str) -> Any:
    """``cuda.<name>``, imported on first use: ``core``, ``core.utils``, ``bindings.driver`` or ``bindings.nvrtc``.

    One thread imports at a time: cuda-core replaces its own ``__spec__`` while it is imported, so Python gives other threads half of it.

    Raises:
        BackendError: it is not installed.
    """
    try:
        with _importing:
            return importlib.import_module(f"cuda.{name}")
    except ImportError as error:
        raise BackendError(f"the Python package cuda-core is missing or broken ({error}); install cuda-core") from error


@functools.cache
def nvrtc_version() -> tuple[int, int]:
    """Version of NVRTC. Raises BackendError if it or cuda-core is not installed."""
    nvrtc = cuda_module("bindings.nvrtc")
    try:
        _, major, minor = nvrtc.nvrtcVersion()
    except RuntimeError as error:
        raise BackendError(f"the compiler library NVRTC cannot be loaded ({error}); install a CUDA build of PyTorch") from error
    return (major, minor)


@dataclass(frozen=True)
class Compiled:
    """A kernel's machine code and its use of resources, as ptxas reports it.

    ``spill_bytes`` is the sum of stores and loads of a thread. ``serialized`` holds the compiler's remarks that wgmma instructions wait for
    each other: such a kernel is right but slow. When NVRTC takes the code from its own cache, which some versions cannot turn off, ptxas
    reports nothing and the number is 0.
    """

    cubin: bytes
    spill_bytes: int
    serialized: tuple[str, ...]


def kernel_path() -> Path:
    """The folder of the CUDA sources: inside the installed package, or beside it in a checkout. Raises BackendError if it is missing."""
    for folder in (_PACKAGE / "kernels", _PACKAGE.parent / "kernels"):
        if any(folder.glob("*.cu")):
            return folder
    raise BackendError(f"the CUDA sources are missing: expected {_PACKAGE / 'kernels'}; install flysurgery again")


def cubin_folder() -> Path:
    """Where machine code is kept. Least recently read files go first once 256 MiB are reached."""
    return cache_folder() / "kernels"


def find_cubin(source: str, defines: Mapping[str, int | str], *, arch: str, name: str, refresh: bool = False) -> bytes:
    """Machine code of one kernel, compiled at most once a machine, NVRTC version and source text.

    Files are written under another name and renamed, so processes that compile the same kernel at once do not disturb each other. If the
    folder cannot be read or written, there is one warning, and each process compiles for itself. A compilation that takes over two seconds
    says so on stderr. ``refresh`` compiles even where a file is there.

    Raises:
        BackendError: as ``compile_cubin``.
    """
    key, folder = cubin_key(source, defines, arch), cubin_folder()
    kept = cubin = None
    try:
        kept = cuda_module("core.utils").FileStreamProgramCache(folder, max_size_bytes=_MAX_BYTES)
        cubin = None if refresh else kept.get(key)
    except OSError as error:
        warn_unwritable("compiled kernels", folder, error)
    if cubin:
        return cubin
    start = time.perf_counter()
    compiled = compile_cubin(source, defines, arch=arch, name=name)
    seconds = time.perf_counter() - start
    if seconds > _SLOW_SECONDS:
        sys.stderr.write(f"flysurgery: compiled kernel {source} for {arch} in {seconds:.1f} s; later runs find it in {folder}\n")
    if compiled.serialized:
        warnings.warn(f"{SERIALIZED_WARNING} {source} slower than it should be: {compiled.serialized[0]}", RuntimeWarning, stacklevel=3)
    if kept is not None:
        try:
            kept[key] = compiled.cubin
        except OSError as error:
            warn_unwritable("compiled kernels", folder, error)
    return compiled.cubin


def compile_cubin(source: str, defines: Mapping[str, int | str], *, arch: str, name: str) -> Compiled:
    """Compile one file of the kernels' folder for one architecture, without fast-math. Takes from a fraction of a second to several.

    Every define becomes ``-DNAME=VALUE``. The sources include only each other's ``.cuh`` files, no header of CUDA or the C++ library.

    Args:
        source: file name in ``kernel_path()``.
        arch: such as ``"sm_90a"``.
        name: the ``extern "C" __global__`` function to report on.

    Raises:
        BackendError: there is no such file or function, NVRTC is missing, or it rejects the source; with its message.
    """
    folder, log = kernel_path(), io.StringIO()
    text, version = _text(folder / source), nvrtc_version()
    core = cuda_module("core")
    # The cache of NVRTC 13, whose hits have no report of ptxas, is turned off where cuda-core can.
    uncached = version >= (13, 0) and any(field.name == "no_cache" for field in fields(core.ProgramOptions))
    try:
        options = core.ProgramOptions(
            name=source,
            arch=arch,
            std="c++17",
            ptxas_options=["-v"],
            define_macro=[(key, str(value)) for key, value in defines.items()] or None,
            include_path=[str(folder)],
            **({"no_cache": True} if uncached else {}),
        )
        cubin = bytes(core.Program(text, "c++", options).compile("cubin", logs=log).code)
    except Exception as error:  # cuda-core's own error type is private
        raise BackendError(f"kernel {source} does not compile for {arch} with {dict(defines)}: {error}") from error
    return _report(cubin, log.getvalue().replace("\0", "").strip(), source, name)


def cubin_key(source: str, defines: Mapping[str, int | str], arch: str) -> bytes:
    """Digest of all that decides the machine code. Paths take no part, so a moved installation keeps its cache."""
    texts, waiting = dict[str, str](), [source]  # of the source, of all that it includes, and so on
    while waiting:
        name = waiting.pop()
        if name not in texts:
            texts[name] = _text(kernel_path() / name)
            waiting += _INCLUDE.findall(texts[name])
    values = sorted((name, str(value)) for name, value in defines.items())
    parts = [_KEY_SCHEMA, nvrtc_version(), arch, source, dict(sorted(texts.items())), values]
    return hashlib.sha256(json.dumps(parts).encode()).digest()


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise BackendError(f"expected the CUDA source {path}: {error.strerror}; install flysurgery again") from error


def _report(cubin: bytes, log: str, source: str, name: str) -> Compiled:
    reports = re.split(r"(?=Compiling entry function ')", log)[1:]
    report = next((text for text in reports if text.startswith(f"Compiling entry function '{name}'")), "")
    if reports and not report:
        raise BackendError(f"kernel {source} has no extern \"C\" __global__ function '{name}'; ptxas says: {log}")

    def number(pattern: str) -> int:
        found = re.search(pattern, report)
        return int(found.group(1)) if found else 0

    return Compiled(
        cubin=cubin,
        spill_bytes=number(r"(\d+) bytes spill stores") + number(r"(\d+) bytes spill loads"),
        serialized=tuple(line for line in log.splitlines() if _SERIALIZED.search(line)),
    )
