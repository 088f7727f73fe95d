"""Open a checkpoint's folder and check all that can be checked before anything is allocated."""

from __future__ import annotations

import os
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
from flysurgery.checkpoint.hashes import sha256_of_each
from flysurgery.checkpoint.header import SCHEMA_KEY, Header
from flysurgery.checkpoint.limits import Limits
from flysurgery.checkpoint.regular import MAX_TEXT_BYTES, open_regular
from flysurgery.checkpoint.tensors import SAFETENSORS_DTYPES, single_float_dtype, unstored_buffers
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
        return self.window(name).to(device=device, dtype=wanted, copy=True)

    def window(self, name: str) -> Tensor:
        """One tensor as it is stored, on the CPU; where the system can, a window into the file, which takes no memory."""
        return self._handle.get_tensor(name)


@contextmanager
def open_tensors(file: Path) -> Iterator[TensorFile]:
    """Open a safetensors file. Its header is checked against the file's length; nothing else is read.

    Raises:
        CheckpointError: it is missing, no regular file, truncated, a pickle, or no safetensors file for another reason.
    """
    try:
        _check_header_size(file)
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


def limits_of(opened: Opened) -> Limits:
    """What building the folder's model may take."""
    shapes = opened.tensors.shapes
    return Limits.of_stored(shapes.values(), len(shapes) + len(opened.header.aliases))


def check_tensors(opened: Opened, skeleton: nn.Module) -> None:
    """Hold the file's names, shapes and dtypes against those of the converted model on meta, and against the header's.

    Besides the state_dict the file may hold buffers of the model that are outside of it. Floating-point dtypes are those that
    the header says. A header of the first versions says none: then they are one, or those of the model.

    Raises:
        CheckpointError: tensors that are missing, unknown, or of another shape or dtype; the message names them.
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
    if opened.header.tensors is None:
        _check_one_dtype(opened, {name: tensor.dtype for name, tensor in (expected | buffers).items()})
        return
    listed = {name: SAFETENSORS_DTYPES.get(entry.dtype) for name, entry in opened.header.tensors.items()}
    differing = [name for name in (*file.dtypes, *listed) if file.dtypes.get(name) != listed.get(name)]
    if differing:
        name = differing[0]
        raise CheckpointError(f"{where} is damaged: its header lists {name} as {listed.get(name)}, and it is {file.dtypes.get(name)}")


def check_hashes(opened: Opened) -> None:
    """Hold the data of every tensor against the hash that the header has of it, if it has any. Reads the whole file once.

    Raises:
        CheckpointError: data that do not match, in any tensor; the message names the first.
    """
    stored = opened.header.tensors or {}
    wrong = [name for name, found in sha256_of_each(stored, opened.tensors.window) if found != stored[name].sha256]
    if wrong:
        more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
        raise CheckpointError(
            f"{opened.folder / WEIGHTS} is damaged or was changed: the data of {wrong[0]}{more} do not match their hash; "
            "copy it again, or load it as it is with verify=False"
        )


def _check_one_dtype(opened: Opened, expected: Mapping[str, torch.dtype]) -> None:
    dtypes = opened.tensors.dtypes
    floating = {name: dtype for name, dtype in dtypes.items() if dtype.is_floating_point}
    if not floating or single_float_dtype(floating) is not None:
        return
    other = next((name for name, dtype in floating.items() if dtype != expected[name]), None)
    if other is not None:
        raise CheckpointError(
            f"{opened.folder / WEIGHTS} does not fit its plan: {other} is {dtypes[other]} instead of {expected[other]}, "
            "and others differ; save the model again to store several dtypes"
        )


def _check_header_size(file: Path) -> None:
    with open_regular(file) as handle:
        size, length = os.fstat(handle.fileno()).st_size, int.from_bytes(handle.read(8), "little")
    if MAX_TEXT_BYTES < length < size:  # safetensors itself sees a length beyond the file's
        raise CheckpointError(f"{file} has a header of {length:,} bytes, and at most {MAX_TEXT_BYTES:,} are read; restore it")


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
    with open_regular(file) as handle:
        start = handle.read(8)
    if start.startswith(PICKLE_STARTS):
        return "it holds a pickle, as torch.save writes it, and pickles can run code; they are never opened"
    size = file.stat().st_size
    return f"{first_line(error)} ({size} bytes; a file that was cut short or is none of that format looks like this)"
