"""A folder that appears complete or not at all."""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from flysurgery.errors import CheckpointError

FILES = ("model.safetensors", "config.json", "report.json", "README.md", "preprocessor_config.json")
"""What a checkpoint's folder consists of; the last only for models of transformers."""

FILE_SUFFIXES = frozenset({".safetensors", ".pt", ".pth", ".bin", ".onnx"})
"""Names of files of weights end in these, and names of folders do not."""


def check_target(folder: str | Path, is_replaceable: Callable[[Path], bool], *, force: bool) -> Path:
    """The folder with symbolic links followed, once it is sure that it may be written (CheckpointError); an empty one counts as none.

    ``is_replaceable`` says whether a folder holds a model of this project, the only thing that ``force`` replaces. To see whether the
    system lets files be made there, one is made beside it and closed.
    """
    try:
        target = Path(folder).expanduser().resolve()
        _check_replaced(target, is_replaceable, force=force)
    except OSError as error:
        raise CheckpointError(f"{folder} could not be written: {error.strerror or error}") from error
    parent = _existing_parent(target)
    try:
        tempfile.TemporaryFile(dir=parent).close()  # nameless, so that a killed process leaves nothing
    except OSError as error:
        reason = f"{error.strerror or error} in {parent}"
        raise CheckpointError(f"{folder} could not be written: {reason}; choose another folder (--out)") from error
    return target


def _check_replaced(folder: Path, is_replaceable: Callable[[Path], bool], *, force: bool) -> None:
    if not folder.name:
        raise CheckpointError(f"'{folder}' cannot be a checkpoint's folder; give it a name of its own")
    if Path.cwd().is_relative_to(folder):
        raise CheckpointError(f"{folder} is the folder that this runs in, or around it, and would be replaced; give a name below it")
    if folder.suffix in FILE_SUFFIXES:
        raise CheckpointError(
            f"{folder} is the name of a file, and a model is saved as a folder; give a folder, such as {folder.with_suffix('')}"
        )
    if folder.exists() and not folder.is_dir():
        raise CheckpointError(f"{folder} is a file; choose the name of a folder")
    if not folder.is_dir() or not any(folder.iterdir()):
        return
    if not is_replaceable(folder):
        raise CheckpointError(f"{folder} exists and is no flysurgery checkpoint, so it is not replaced; choose another folder")
    if not force:
        raise CheckpointError(f"{folder} exists; give force=True (--force) to replace it, or choose another folder")
    strangers = sorted(path.name for path in folder.iterdir() if path.name not in FILES)
    if strangers:
        raise CheckpointError(f"{folder} also holds {', '.join(strangers[:3])}, which replacing it would lose; move that away first")


def check_space(folder: Path, nbytes: int) -> None:
    """Refuse to write ``nbytes`` to ``folder`` where its disk has less room (CheckpointError)."""
    parent = _existing_parent(folder)
    free = shutil.disk_usage(parent).free
    if free < nbytes:
        needs = f"{folder} needs {nbytes / 1e6:.1f} MB and {parent} has {free / 1e6:.1f} MB left"
        raise CheckpointError(f"{needs}; make room, or choose another disk (--out)")


def _existing_parent(folder: Path) -> Path:
    """The nearest parent that is there; a file counts, so that the attempt to write into it gives the reason."""
    return next(parent for parent in folder.expanduser().absolute().parents if parent.exists())


def write_json(file: Path, value: Mapping[str, Any]) -> None:
    """Write ``value``, which holds no NaN, for people to read too."""
    file.write_text(json.dumps(value, indent=2, allow_nan=False) + "\n", encoding="utf-8")


@contextmanager
def new_folder(target: Path, *, force: bool) -> Iterator[Path]:
    """Yield an empty folder beside ``target``; when the block ends well, it takes the place of ``target``, on disk for good.

    With ``force`` an old folder is set aside by a rename, and removed once the new one stands; without it only an empty one gives way. If
    anything fails or is interrupted, the old one is where it was, and nothing else is left: no file, and no parent folder that was
    made for it. What a killed process left beside ``target`` is removed at the end. Raises a CheckpointError where the system refuses, or
    another process has written ``target`` meanwhile.
    """
    made: list[Path] = []
    token = secrets.token_hex(4)
    fresh = target.with_name(f".{target.name}.{token}.new")
    old = target.with_name(f".{target.name}.{token}.old")
    try:
        made += [folder for folder in target.parents if not folder.exists()]
        fresh.mkdir(parents=True)
        yield fresh
        for file in fresh.iterdir():
            file.chmod(fresh.stat().st_mode & 0o666)  # safetensors makes files that only their owner may read
            with file.open("rb+") as handle:
                os.fsync(handle.fileno())
        _flush_entries(fresh)
        if target.exists():
            if not force and any(target.iterdir()):
                raise CheckpointError(f"{target} was written by another process meanwhile; choose another folder, or replace that one")
            target.rename(old)
        fresh.rename(target)
    except BaseException as error:
        if old.exists() and not target.exists():
            old.rename(target)
        shutil.rmtree(fresh, ignore_errors=True)
        for folder in made:
            with suppress(OSError):  # what another process has written into stays
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
    """Remove what killed processes have left beside ``target``; a living one that writes the same folder fails by it, and says so."""
    left = re.compile(rf"\.{re.escape(target.name)}\.[0-9a-f]{{8}}\.(new|old)")
    for path in target.parent.iterdir():
        if left.fullmatch(path.name) and path.is_dir():
            shutil.rmtree(path, ignore_errors=True)


def _flush_entries(folder: Path) -> None:
    if os.name == "nt":  # Windows opens no folders and writes their entries by itself
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
