"""A folder that appears complete or not at all."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from flysurgery.errors import CheckpointError

FILES = ("model.safetensors", "config.json", "report.json", "README.md")
"""What a checkpoint's folder consists of."""


def check_target(folder: Path, *, replaceable: bool, force: bool) -> None:
    """See that a checkpoint may be written to ``folder``; an empty folder counts as none.

    ``replaceable`` says whether the folder holds a checkpoint of this project, the only thing that ``force`` replaces.

    Raises:
        CheckpointError: the folder exists and may not be replaced; the message says why and what to do.
    """
    if not folder.name:
        raise CheckpointError(f"'{folder}' cannot be a checkpoint's folder; give it a name of its own")
    if folder.exists() and not folder.is_dir():
        raise CheckpointError(f"{folder} is a file; choose the name of a folder")
    if not folder.is_dir() or not any(folder.iterdir()):
        return
    if not replaceable:
        raise CheckpointError(f"{folder} exists and is no flysurgery checkpoint, so it is not replaced; choose another folder")
    if not force:
        raise CheckpointError(f"{folder} exists; give force=True (--force) to replace it, or choose another folder")
    strangers = sorted(path.name for path in folder.iterdir() if path.name not in FILES)
    if strangers:
        raise CheckpointError(f"{folder} also holds {', '.join(strangers[:3])}, which replacing it would lose; move that away first")


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """Yield an empty folder beside ``target``; when the block ends well, it takes the place of ``target``, on disk for good.

    An old folder is set aside by a rename, and removed once the new one stands. If anything fails or is interrupted, the
    old one is where it was, and nothing else is left: no file, and no parent folder that was made for it.

    Raises:
        CheckpointError: the system refused, for want of space or permission, say; one sentence.
    """
    made: list[Path] = []
    token = secrets.token_hex(4)
    fresh = target.with_name(f".{target.name}.{token}.new")
    old = target.with_name(f".{target.name}.{token}.old")
    try:
        made = _make_parents(target.parent)
        fresh.mkdir()
        yield fresh
        _flush(fresh)
        if target.exists():
            target.rename(old)
        fresh.rename(target)
    except BaseException as error:
        if old.exists() and not target.exists():
            old.rename(target)
        shutil.rmtree(fresh, ignore_errors=True)
        for folder in reversed(made):
            if folder.is_dir() and not any(folder.iterdir()):
                folder.rmdir()
        if isinstance(error, OSError | SafetensorError):
            reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error).rstrip(".")
            raise CheckpointError(f"{target} could not be written: {reason}; nothing was changed") from error
        raise
    finally:
        if target.exists():
            shutil.rmtree(old, ignore_errors=True)
    _flush_entries(target.parent)


def _make_parents(folder: Path) -> list[Path]:
    made = []
    for each in reversed([folder, *folder.parents]):
        if not each.exists():
            each.mkdir()
            made.append(each)
    return made


def _flush(folder: Path) -> None:
    for file in folder.iterdir():
        with file.open("rb+") as handle:
            os.fsync(handle.fileno())
    _flush_entries(folder)


def _flush_entries(folder: Path) -> None:
    if os.name == "nt":  # Windows opens no folders and writes their entries by itself
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
