"""Read files from anywhere, as JSON or safetensors and never as a pickle; and write folders that appear complete or not at all."""

import json
import os
import re
import secrets
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from flysurgery.checkpoint.tensors import SAFETENSORS_DTYPES
from flysurgery.errors import CheckpointError, first_line, shown

FILES = ("model.safetensors", "config.json", "report.json", "README.md", "preprocessor_config.json")
"""What a checkpoint's folder consists of; the last only for models of transformers."""

FILE_SUFFIXES = frozenset({".safetensors", ".pt", ".pth", ".bin", ".onnx"})
"""Names of files of weights end in these, and names of folders do not."""

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
    except (FileNotFoundError, CheckpointError):
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
            raise CheckpointError(f"{file} cannot be read as JSON: {error}; copy it again") from error


def parse_json(text: str) -> Any:
    """Parse JSON from anywhere. Raises ValueError, also where it holds NaN or has more than ``MAX_LEVELS`` levels."""
    too_deep = ValueError(f"JSON nested too deeply, in more than {MAX_LEVELS} levels")
    try:
        found = json.loads(text, parse_constant=_refuse_constant)
    except RecursionError as error:
        raise too_deep from error
    level = [found]
    for _ in range(MAX_LEVELS + 1):
        level = [each for each in level if isinstance(each, dict | list)]
        level = [each for parent in level for each in (parent.values() if isinstance(parent, dict) else parent)]
    if level:
        raise too_deep
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
    """Open a safetensors file and check its header against the file's length; CheckpointError where it is no whole safetensors file."""
    size, start = 0, b""
    try:
        with open_regular(file) as opened:
            size, start = os.fstat(opened.fileno()).st_size, opened.read(8)
        header = int.from_bytes(start, "little")
        if MAX_JSON_BYTES < header < size:  # safetensors itself sees a length beyond the file's
            raise CheckpointError(f"{file} has a header of {header:,} bytes, and at most {MAX_JSON_BYTES:,} are read; restore it")
        handle = safe_open(file, framework="pt", device="cpu")
    except FileNotFoundError as error:
        raise CheckpointError(f"there is no {file}") from error
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror or error}") from error
    except SafetensorError as error:
        reason = f"{first_line(error)} ({size} bytes; a file that was cut short or is none of that format looks like this); copy it again"
        if start.startswith(PICKLE_STARTS):
            reason = "it holds a pickle, as torch.save writes it, and pickles can run code; they are never opened"
        raise CheckpointError(f"{file} is no safetensors file: {reason}") from error
    with handle:
        yield TensorFile(file, handle)


def check_target(folder: str | Path, is_replaceable: Callable[[Path], bool], *, force: bool) -> Path:
    """The folder with symbolic links followed, once it is sure that it may be written (CheckpointError); an empty one counts as none.

    ``is_replaceable`` says whether a folder holds a model of this project, the only thing that ``force`` replaces. To see whether the
    system lets files be made there, one is made beside it and closed.
    """
    try:
        target = Path(folder).expanduser().resolve()
        str(target).encode("utf-8")  # as the card of the model has its name
        _check_replaced(target, is_replaceable, force=force)
    except CheckpointError:
        raise
    except (OSError, ValueError, RuntimeError) as error:  # the latter two for names that no file can have, and homes of nobody
        reason = getattr(error, "strerror", None) or first_line(error)
        raise CheckpointError(f"{shown(str(folder))} could not be written: {reason}; choose another folder (--out)") from error
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


def json_text(value: Mapping[str, Any]) -> str:
    """``value``, which holds no NaN, as text that people read too."""
    return json.dumps(value, indent=2, allow_nan=False) + "\n"


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
    fresh, old = (target.with_name(f".{target.name}.{token}.{end}") for end in ("new", "old"))
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
    # what killed processes have left; a living one that writes the same folder fails by it, and says so
    left = re.compile(rf"\.{re.escape(target.name)}\.[0-9a-f]{{8}}\.(new|old)")
    with suppress(OSError):  # the new folder stands, also where its parent may not be listed
        for path in target.parent.iterdir():
            if left.fullmatch(path.name) and path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
        _flush_entries(target.parent)


def _flush_entries(folder: Path) -> None:
    if os.name == "nt":  # Windows opens no folders and writes their entries by itself
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
