"""The output folder, looked at before the work that it is for."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from flysurgery.errors import CheckpointError


def check_writable(folder: Path) -> None:
    """See that files can be made where ``folder`` will be, by making and removing one beside it.

    Raises:
        CheckpointError: the system refuses, with its reason.
    """
    parent = _existing(folder)
    try:
        with tempfile.TemporaryDirectory(dir=parent, prefix=".flysurgery."):
            pass
    except OSError as error:
        raise CheckpointError(
            f"{folder} cannot be written: {error.strerror or error} in {parent}; choose another folder with --out"
        ) from error


def check_space(folder: Path, nbytes: int) -> None:
    """See that ``nbytes`` fit on the disk of ``folder``.

    Raises:
        CheckpointError: they do not; the message gives both numbers.
    """
    parent = _existing(folder)
    free = shutil.disk_usage(parent).free
    if free < nbytes:
        raise CheckpointError(
            f"{folder} needs {nbytes / 1e6:.1f} MB and {parent} has {free / 1e6:.1f} MB left; choose another disk with --out"
        )


def _existing(folder: Path) -> Path:
    """The nearest parent that is there; a file counts, so that the attempt to write into it gives the reason."""
    return next(parent for parent in folder.expanduser().absolute().parents if parent.exists())
