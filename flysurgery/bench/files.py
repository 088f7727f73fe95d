"""Files of results: looked at before the measurement that they are for, and replaced whole or not at all."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

from flysurgery.errors import OptionError


def check_file(path: Path, option: str) -> None:
    """See that a file can be written at ``path``, by making and removing a folder beside it; ``option`` named it.

    Raises:
        OptionError: something else than a file is there, or the system refuses, with its reason.
    """
    if path.exists() and not path.is_file():
        raise OptionError(f"{option} takes a file, and {path} is none; choose another name")
    folder = next(parent for parent in path.expanduser().absolute().parents if parent.exists())
    try:
        if path.exists():
            path.open("ab").close()
        with tempfile.TemporaryDirectory(dir=folder, prefix=".flysurgery."):
            pass
    except OSError as error:
        raise OptionError(f"{option} cannot write {path}: {error.strerror or error}; choose another file") from error


def check_apart(files: Mapping[str, Path | None]) -> None:
    """See that options, by name, do not name one file twice: what is written last would take the place of the rest.

    Raises:
        OptionError: two do.
    """
    seen: dict[Path, str] = {}
    for option, path in files.items():
        if path is not None:
            first = seen.setdefault(path.expanduser().resolve(), option)
            if first != option:
                raise OptionError(f"{first} and {option} name the same file, {path}; give each its own")


def replace_text(path: Path, text: str) -> None:
    """Write ``text``; whoever reads meanwhile, or after a kill in the middle, finds the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        unfinished.write_text(text, encoding="utf-8")
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
