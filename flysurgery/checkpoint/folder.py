"""A folder that appears complete or not at all."""

from __future__ import annotations

import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from safetensors import SafetensorError

from flysurgery.checkpoint.lock import held, is_held
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
    if Path.cwd().is_relative_to(folder):
        raise CheckpointError(f"{folder} is the folder that this runs in, or around it, and would be replaced; give a name below it")
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
def new_folder(target: Path, *, force: bool) -> Iterator[Path]:
    """Yield an empty folder beside ``target``; when the block ends well, it takes the place of ``target``, on disk for good.

    With ``force`` an old folder is set aside by a rename, and removed once the new one stands; without it only an empty one gives way. If
    anything fails or is interrupted, the old one is where it was, and nothing else is left: no file, and no parent folder that was
    made for it. What a killed process left beside ``target`` is removed at the end.

    Raises:
        CheckpointError: the system refused, for want of space or permission, say, or another process has written ``target`` meanwhile;
            one sentence.
    """
    made: list[Path] = []
    token = secrets.token_hex(4)
    fresh = target.with_name(f".{target.name}.{token}.new")
    old = target.with_name(f".{target.name}.{token}.old")
    with ExitStack() as locks:
        try:
            made = _make_parents(target.parent)
            fresh.mkdir()
            locks.enter_context(held(fresh))
            yield fresh
            _flush(fresh)
            if target.exists():
                if not force and any(target.iterdir()):
                    raise CheckpointError(f"{target} was written by another process meanwhile; choose another folder, or replace that one")
                locks.enter_context(held(target))
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
    _remove_abandoned(target)
    _flush_entries(target.parent)


def _remove_abandoned(target: Path) -> None:
    """Remove what processes that are gone have left beside ``target``."""
    left = re.compile(rf"\.{re.escape(target.name)}\.[0-9a-f]{{8}}\.(new|old)")
    for path in target.parent.iterdir():
        if left.fullmatch(path.name) and path.is_dir() and not is_held(path):
            shutil.rmtree(path, ignore_errors=True)


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
