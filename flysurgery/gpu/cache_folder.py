"""Where compiled kernels and autotuned choices are kept between processes."""

import os
import warnings
from pathlib import Path

_warned: set[str] = set()


def cache_folder() -> Path:
    """The user's cache folder: ``$FLYSURGERY_CACHE``, else ``flysurgery`` where the platform keeps caches. Not created here."""
    if chosen := os.environ.get("FLYSURGERY_CACHE"):
        return Path(chosen).expanduser()
    if os.name == "nt":
        local = os.environ.get("LOCALAPPDATA")
        return (Path(local) if local else Path.home() / "AppData" / "Local") / "flysurgery"
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared) if shared else Path.home() / ".cache") / "flysurgery"


def folder_obstacle(folder: Path) -> str | None:
    """Why files cannot be written into ``folder``, which need not exist yet; None when they can."""
    existing = folder
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    if not existing.is_dir():
        return f"{existing} is not a folder"
    return None if os.access(existing, os.W_OK | os.X_OK) else f"{existing} is not writable"


def warn_unwritable(what: str, folder: Path, error: OSError) -> None:
    """Say once a process that ``what`` will not outlast it, and how to change that."""
    if what not in _warned:
        _warned.add(what)
        warnings.warn(
            f"{what} cannot be kept in {folder} ({error.strerror or error}), so this process goes on without; "
            f"set FLYSURGERY_CACHE to a folder that can be written",
            RuntimeWarning,
            stacklevel=3,
        )
