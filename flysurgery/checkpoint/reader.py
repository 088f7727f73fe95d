"""Open a checkpoint's folder and check all that can be checked before anything is allocated."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from flysurgery.checkpoint.base import ENTRY_POINT, first_line
from flysurgery.checkpoint.compare import difference
from flysurgery.checkpoint.config import check_config, read_config
from flysurgery.checkpoint.header import SCHEMA_KEY, Header
from flysurgery.checkpoint.tensors import SAFETENSORS_DTYPES, unstored_buffers
from flysurgery.errors import CheckpointError

WEIGHTS = "model.safetensors"

PICKLE_STARTS = (b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")
"""How files of ``torch.save`` begin: a zip archive, or a bare pickle."""


class TensorFile:
    """The names, shapes and dtypes of a safetensors file, and its tensors one by one.

    Raises:
        CheckpointError: a dtype that checkpoints do not hold.
    """

    def __init__(self, file: Path, handle: Any) -> None:
        self.metadata: Mapping[str, str] | None = handle.metadata()
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, torch.dtype] = {}
        self._handle = handle
        for name in handle.keys():  # noqa: SIM118  a handle is no mapping
            piece = handle.get_slice(name)
            if piece.get_dtype() not in SAFETENSORS_DTYPES:
                raise CheckpointError(f"{file}: tensor {name} has dtype {piece.get_dtype()}, which no checkpoint holds")
            self.shapes[name] = tuple(piece.get_shape())
            self.dtypes[name] = SAFETENSORS_DTYPES[piece.get_dtype()]

    def tensor(self, name: str, device: torch.device, dtype: torch.dtype | None) -> Tensor:
        """Read one tensor, a floating-point one in ``dtype`` if that is given. It is a copy, not a window into the file."""
        wanted = dtype if dtype is not None and self.dtypes[name].is_floating_point else self.dtypes[name]
        return self._handle.get_tensor(name).to(device=device, dtype=wanted, copy=True)


@contextmanager
def open_tensors(file: Path) -> Iterator[TensorFile]:
    """Open a safetensors file. Its header is checked against the file's length; nothing else is read.

    Raises:
        CheckpointError: it is missing, truncated, a pickle, or no safetensors file for another reason.
    """
    try:
        handle = safe_open(file, framework="pt", device="cpu")
    except FileNotFoundError as error:
        raise CheckpointError(f"there is no {file}") from error
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror or error}") from error
    except SafetensorError as error:
        raise CheckpointError(f"{file} is no safetensors file: {_reason(file, error)}") from error
    with handle:
        yield TensorFile(file, handle)


@dataclass(frozen=True)
class Opened:
    """A checkpoint whose header and configuration are read and agree."""

    folder: Path
    header: Header
    config: Mapping[str, Any]
    tensors: TensorFile


@contextmanager
def open_checkpoint(folder: Path) -> Iterator[Opened]:
    """Open a checkpoint's folder.

    Raises:
        CheckpointError: there is none, a file is damaged, or the files contradict each other; one sentence.
    """
    if not folder.is_dir():
        raise CheckpointError(f"there is no folder {folder}")
    config = read_config(folder)
    with open_tensors(folder / WEIGHTS) as tensors:
        header = Header.from_metadata(tensors.metadata, str(folder / WEIGHTS))
        check_config(config, header.plan, folder)
        yield Opened(folder, header, config, tensors)


def check_tensors(opened: Opened, skeleton: nn.Module) -> None:
    """Hold the file's names, shapes and dtypes against those of the converted model on meta.

    Besides the state_dict the file may hold buffers of the model that are outside of it.

    Raises:
        CheckpointError: tensors that are missing, unknown, or of another shape or kind of dtype; the message names them.
    """
    where = opened.folder / WEIGHTS
    file, aliases = opened.tensors, opened.header.aliases
    for alias, name in aliases.items():
        if alias in file.shapes or name not in file.shapes:
            raise CheckpointError(f"{where} is damaged: it calls {alias} a second name of {name}, and does not hold the one or holds both")
    found = file.shapes | {alias: file.shapes[name] for alias, name in aliases.items()}
    expected = skeleton.state_dict()
    buffers = {name: buffer for name, buffer in unstored_buffers(skeleton).items() if name in found}
    wrong = difference(found, {name: tuple(tensor.shape) for name, tensor in (expected | buffers).items()})
    if wrong:
        raise CheckpointError(f"{where} does not fit its plan: {wrong}")
    for name, tensor in (expected | buffers).items():
        dtype = file.dtypes[aliases.get(name, name)]
        if dtype != tensor.dtype and not (dtype.is_floating_point and tensor.is_floating_point()):
            raise CheckpointError(f"{where} does not fit its plan: {name} is {dtype} instead of {tensor.dtype}")


def is_converted(folder: str | Path) -> bool:
    """Whether ``folder`` holds a checkpoint of a converted model, a damaged one included. Reads no weights, and never raises."""
    path = Path(folder)
    try:
        if read_config(path)["architecture"] == ENTRY_POINT:
            return True
    except CheckpointError:
        pass
    try:
        with open_tensors(path / WEIGHTS) as tensors:
            return SCHEMA_KEY in (tensors.metadata or {})
    except CheckpointError:
        return False


def _reason(file: Path, error: SafetensorError) -> str:
    with file.open("rb") as handle:
        start = handle.read(8)
    if start.startswith(PICKLE_STARTS):
        return "it holds a pickle, as torch.save writes it, and pickles can run code; they are never opened"
    size = file.stat().st_size
    return f"{first_line(error)} ({size} bytes; a file that was cut short or is none of that format looks like this)"
