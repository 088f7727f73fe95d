"""Read files from anywhere: regular ones of a bounded size, as JSON or safetensors, and never as a pickle."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from flysurgery.checkpoint.tensors import SAFETENSORS_DTYPES
from flysurgery.errors import CheckpointError, first_line

MAX_JSON_BYTES = 4 << 20
"""Most bytes of JSON that are read of a file; parsed they may take 20 times as many. A ViT of 7 billion parameters has less than 1 MB."""

MAX_LEVELS = 32
"""Most lists and objects within each other in JSON that is read, so that recursive functions may go through it."""

FLAGS = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
"""Opening a pipe waits for its other end without ``O_NONBLOCK``. The last two names are Unix' and Windows' own."""

PICKLE_STARTS = (b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")
"""How files of ``torch.save`` begin: a zip archive, or a bare pickle."""


@contextmanager
def open_regular(file: Path) -> Iterator[BinaryIO]:
    """Open a regular file to read bytes; symbolic links are followed. Never waits, and opens no device.

    Raises FileNotFoundError, or a CheckpointError where it is a folder, a pipe or the like, or the system refuses.
    """
    try:
        _check_regular(file, file.stat().st_mode)
        descriptor = os.open(file, FLAGS)
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:  # ValueError for a name that no file can have
        raise CheckpointError(f"{file} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    with os.fdopen(descriptor, "rb") as handle:
        _check_regular(file, os.fstat(descriptor).st_mode)  # it may have been replaced in between
        yield handle


def _check_regular(file: Path, mode: int) -> None:
    if not stat.S_ISREG(mode):
        kinds = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}
        raise CheckpointError(f"{file} is {kinds.get(stat.S_IFMT(mode), 'a device')}, expected a regular file")


def read_json(file: Path) -> Any:
    """Parse a regular file of at most ``MAX_JSON_BYTES`` as JSON.

    Raises FileNotFoundError, or a CheckpointError where it cannot be read, is larger or holds no JSON.
    """
    with open_regular(file) as handle:
        size = os.fstat(handle.fileno()).st_size
        if size > MAX_JSON_BYTES:
            raise CheckpointError(f"{file} has {size:,} bytes, and at most {MAX_JSON_BYTES:,} are read; restore it")
        try:
            return parse_json(handle.read(MAX_JSON_BYTES).decode("utf-8"))
        except OSError as error:
            raise CheckpointError(f"{file} cannot be read: {error.strerror or error}") from error
        except ValueError as error:
            raise CheckpointError(f"{file} cannot be read as JSON: {error}") from error


def parse_json(text: str) -> Any:
    """Parse JSON from anywhere. Raises ValueError, also where it holds NaN or has more than ``MAX_LEVELS`` levels."""
    too_deep = f"JSON nested too deeply, in more than {MAX_LEVELS} levels"
    try:
        found = json.loads(text, parse_constant=_refuse_constant)
    except RecursionError as error:
        raise ValueError(too_deep) from error
    level = [found]
    for _ in range(MAX_LEVELS + 1):
        level = [each for each in level if isinstance(each, dict | list)]
        level = [each for parent in level for each in (parent.values() if isinstance(parent, dict) else parent)]
    if level:
        raise ValueError(too_deep)
    return found


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


class TensorFile:
    """The names, shapes and dtypes of a safetensors file, and its tensors one by one; refuses other dtypes (CheckpointError)."""

    def __init__(self, file: Path, handle: Any) -> None:
        self.path = file
        self.metadata: Mapping[str, str] = handle.metadata() or {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, torch.dtype] = {}
        self._handle = handle
        for name in handle.keys():  # noqa: SIM118  a handle is no mapping
            piece = handle.get_slice(name)
            if piece.get_dtype() not in SAFETENSORS_DTYPES:
                raise CheckpointError(f"{file}: tensor {name} has dtype {piece.get_dtype()}, which no checkpoint holds")
            self.shapes[name] = tuple(piece.get_shape())
            self.dtypes[name] = SAFETENSORS_DTYPES[piece.get_dtype()]

    def window(self, name: str) -> Tensor:
        """One tensor as it is stored, on the CPU; where the system can, a window into the file, which takes no memory."""
        return self._handle.get_tensor(name)

    def tensor(self, name: str, device: torch.device | None = None, dtype: torch.dtype | None = None) -> Tensor:
        """A copy of one tensor; ``dtype`` is for floating-point ones only."""
        wanted = dtype if dtype is not None and self.dtypes[name].is_floating_point else self.dtypes[name]
        return self.window(name).to(device=device, dtype=wanted, copy=True)


@contextmanager
def open_tensors(file: Path) -> Iterator[TensorFile]:
    """Open a safetensors file. Its header is checked against the file's length; nothing else is read.

    Raises a CheckpointError where it is missing, no regular file, truncated, a pickle, or no safetensors file for another reason.
    """
    try:
        with open_regular(file) as start:
            size, header = os.fstat(start.fileno()).st_size, int.from_bytes(start.read(8), "little")
        if MAX_JSON_BYTES < header < size:  # safetensors itself sees a length beyond the file's
            raise CheckpointError(f"{file} has a header of {header:,} bytes, and at most {MAX_JSON_BYTES:,} are read; restore it")
        handle = safe_open(file, framework="pt", device="cpu")
    except FileNotFoundError as error:
        raise CheckpointError(f"there is no {file}") from error
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror or error}") from error
    except SafetensorError as error:
        raise CheckpointError(f"{file} is no safetensors file: {_reason(file, error)}") from error
    with handle:
        yield TensorFile(file, handle)


def _reason(file: Path, error: SafetensorError) -> str:
    with open_regular(file) as handle:
        start = handle.read(8)
    if start.startswith(PICKLE_STARTS):
        return "it holds a pickle, as torch.save writes it, and pickles can run code; they are never opened"
    return f"{first_line(error)} ({file.stat().st_size} bytes; a file that was cut short or is none of that format looks like this)"
