"""Open regular files only, of a bounded size."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from flysurgery.errors import CheckpointError

MAX_TEXT_BYTES = 4 << 20
"""Most bytes of JSON that are read of a file; parsed they may take 20 times as many. A ViT of 7 billion parameters has less than 1 MB."""

FLAGS = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
"""Opening a pipe waits for its other end without ``O_NONBLOCK``. The last two names are Unix' and Windows' own."""


@contextmanager
def open_regular(file: Path) -> Iterator[BinaryIO]:
    """Open a regular file to read bytes; symbolic links are followed. Never waits, and opens no device.

    Raises:
        FileNotFoundError: there is none.
        CheckpointError: it is a folder, a pipe, a device or the like, or the system refuses to open it; one sentence.
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


def read_text(file: Path) -> str:
    """The content of a regular file of at most ``MAX_TEXT_BYTES``.

    Raises:
        FileNotFoundError: there is none.
        CheckpointError: it is no regular file, is larger, or cannot be read; one sentence.
        UnicodeDecodeError: it is not UTF-8.
    """
    with open_regular(file) as handle:
        size = os.fstat(handle.fileno()).st_size
        if size > MAX_TEXT_BYTES:
            raise CheckpointError(f"{file} has {size:,} bytes, and at most {MAX_TEXT_BYTES:,} are read; restore it")
        try:
            content = handle.read(MAX_TEXT_BYTES)
        except OSError as error:
            raise CheckpointError(f"{file} cannot be read: {error.strerror or error}") from error
    return content.decode("utf-8")


def _check_regular(file: Path, mode: int) -> None:
    if not stat.S_ISREG(mode):
        kinds = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}
        raise CheckpointError(f"{file} is {kinds.get(stat.S_IFMT(mode), 'a device')}, expected a regular file")
