"""CUDA C++ to machine code: NVRTC through cuda-core. Needs neither a GPU nor nvcc."""

from __future__ import annotations

import hashlib
import io
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from flysurgery.errors import BackendError
from flysurgery.gpu.bindings import cuda_module, nvrtc_version

_PACKAGE = Path(__file__).resolve().parents[1]
_SERIALIZED = re.compile(r"\(C751\d\)")
_INCLUDE = re.compile(r'^\s*#include "(.+)"', re.MULTILINE)
_KEY_SCHEMA = 2


@dataclass(frozen=True)
class Compiled:
    """A kernel's machine code and its use of resources, as ptxas reports it.

    ``spill_bytes`` is the sum of stores and loads of a thread. ``serialized`` holds the
    compiler's remarks that wgmma instructions wait for each other: such a kernel is right but slow. When NVRTC takes the
    code from its own cache, which some versions cannot turn off, ptxas reports nothing and the numbers are 0.
    """

    cubin: bytes
    registers: int
    spill_bytes: int
    serialized: tuple[str, ...]


def kernel_path() -> Path:
    """The folder of the CUDA sources: inside the installed package, or beside it in a checkout.

    Raises:
        BackendError: neither is there.
    """
    for folder in (_PACKAGE / "kernels", _PACKAGE.parent / "kernels"):
        if any(folder.glob("*.cu")):
            return folder
    raise BackendError(f"the CUDA sources are missing: expected {_PACKAGE / 'kernels'}; install flysurgery again")


def compile_cubin(source: str, defines: Mapping[str, int | str], *, arch: str, name: str) -> Compiled:
    """Compile one file of the kernels' folder for one architecture.

    Every define becomes ``-DNAME=VALUE``. The sources include only each other's ``.cuh`` files, no header of CUDA or
    the C++ library, so that nothing but them and NVRTC is needed. Fast-math options are off. Takes from a fraction of a second to several.

    Args:
        source: file name in ``kernel_path()``.
        arch: such as ``"sm_90a"``.
        name: the ``extern "C" __global__`` function to report on.

    Raises:
        BackendError: there is no such file or function, NVRTC is missing, or it rejects the source; with its message.
    """
    folder = kernel_path()
    log = io.StringIO()
    text = _text(folder / source)
    nvrtc_version()
    core = cuda_module("core")
    try:
        options = core.ProgramOptions(
            name=source,
            arch=arch,
            std="c++17",
            ptxas_options=["-v"],
            define_macro=[(key, str(value)) for key, value in defines.items()] or None,
            include_path=[str(folder)],
            **_without_cache(core),
        )
        cubin = bytes(core.Program(text, "c++", options).compile("cubin", logs=log).code)
    except Exception as error:  # cuda-core's own error type is private
        raise BackendError(f"kernel {source} does not compile for {arch} with {dict(defines)}: {error}") from error
    return _report(cubin, log.getvalue().replace("\0", "").strip(), source, name)


def _without_cache(core: Any) -> dict[str, bool]:
    """The option that turns off the cache of NVRTC 13, whose hits have no report of ptxas."""
    known = any(field.name == "no_cache" for field in fields(core.ProgramOptions))
    return {"no_cache": True} if known and nvrtc_version() >= (13, 0) else {}


def cubin_key(source: str, defines: Mapping[str, int | str], arch: str) -> bytes:
    """Digest of all that decides the machine code: the source, what it includes, and the rest. Paths take no part, so a moved
    installation keeps its cache.
    """
    values = sorted((name, str(value)) for name, value in defines.items())
    parts = [_KEY_SCHEMA, nvrtc_version(), arch, source, _with_included(source), values]
    return hashlib.sha256(json.dumps(parts).encode()).digest()


def _with_included(source: str) -> dict[str, str]:
    """The texts of a source and of all files that it includes, and these in turn, by name."""
    texts: dict[str, str] = {}
    waiting = [source]
    while waiting:
        name = waiting.pop()
        if name not in texts:
            texts[name] = _text(kernel_path() / name)
            waiting += _INCLUDE.findall(texts[name])
    return dict(sorted(texts.items()))


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
        registers=number(r"Used (\d+) registers"),
        spill_bytes=number(r"(\d+) bytes spill stores") + number(r"(\d+) bytes spill loads"),
        serialized=tuple(line for line in log.splitlines() if _SERIALIZED.search(line)),
    )
