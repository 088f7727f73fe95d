"""The tensors of a model as a file holds them: their dtypes, names, shapes and hashes."""

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn

from flysurgery.errors import CheckpointError, OptionError, raised_as

SAFETENSORS_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
}
"""The dtypes that a checkpoint may hold, by safetensors' names."""

FLOAT_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}

MAX_THREADS = 8
"""Most threads that hash; memory gives no more than a few can read."""


def read_dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """The floating-point dtype that a name such as "bfloat16" means (OptionError)."""
    if dtype is None or dtype in FLOAT_DTYPES.values():
        return dtype  # pyright: ignore[reportReturnType]
    if str(dtype) in FLOAT_DTYPES:
        return FLOAT_DTYPES[str(dtype)]
    raise OptionError(f"dtype must be one of {', '.join(FLOAT_DTYPES)}, got {dtype}")


def read_device(device: torch.device | str) -> torch.device:
    """The device of that name, which torch must know and this machine have (OptionError)."""
    with raised_as(OptionError, f"device '{device}' cannot be used on this machine"):
        place = torch.device(device)
        torch.empty(0, device=place)
    return place


def single_float_dtype(dtypes: Iterable[torch.dtype]) -> torch.dtype | None:
    """The floating-point dtype that all floating-point tensors share, None where they differ or there are none."""
    found = {dtype for dtype in dtypes if dtype.is_floating_point}
    return found.pop() if len(found) == 1 else None


def collect(tensors: Mapping[str, Tensor], dtype: torch.dtype | None) -> dict[str, Tensor]:
    """The tensors on the CPU, contiguous, each with memory of its own, and floating-point ones in ``dtype`` if it is given.

    Raises a CheckpointError that names what is no tensor, is on meta, has a dtype that files cannot hold, or a number beyond ``dtype``.
    """
    stored: dict[str, Tensor] = {}
    taken: set[int] = set()
    for name, given in tensors.items():
        if not isinstance(given, Tensor):
            raise CheckpointError(f"{name} is no tensor but a {type(given).__name__}, which a checkpoint cannot hold")
        if given.is_meta:
            raise CheckpointError(f"{name} is on the meta device and has no values to save; load the weights first")
        if given.dtype not in SAFETENSORS_DTYPES.values() or given.layout != torch.strided:
            raise CheckpointError(f"{name} is a {given.layout} tensor of {given.dtype}, which a checkpoint cannot hold")
        tensor = given.detach().cpu()
        cast = tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor
        if cast is not tensor and bool((torch.isfinite(tensor) & ~torch.isfinite(cast)).any()):
            width = str(dtype).removeprefix("torch.")
            raise CheckpointError(f"{name} has numbers beyond the range of {width}; bfloat16 has the range of float32")
        cast = cast.contiguous()
        # Views would write their neighbours' bytes too, and safetensors refuses tensors that share storage.
        is_own = cast.untyped_storage().nbytes() == cast.nbytes and cast.data_ptr() not in taken
        stored[name] = cast if is_own else cast.clone()
        taken.add(stored[name].data_ptr())
    return stored


def unstored_buffers(model: nn.Module) -> dict[str, Tensor]:
    """The buffers outside the state_dict, which the model's constructor computes, by name."""
    return {
        f"{prefix}.{name}" if prefix else name: buffer
        for prefix, module in model.named_modules(remove_duplicate=False)
        for name, buffer in module.named_buffers(recurse=False)
        if name in module._non_persistent_buffers_set
    }


def difference(found: Mapping[str, object], expected: Mapping[str, object]) -> str | None:
    """What is missing, unknown or of another shape in ``found``, as the end of a sentence; None where nothing is.

    Entries are tensors or their shapes; the shape of anything else is empty.
    """

    def shape_of(entry: object) -> list[int]:
        return list(entry if isinstance(entry, tuple) else getattr(entry, "shape", ()))

    has, wants = ({name: shape_of(each) for name, each in entries.items()} for entries in (found, expected))
    missing = [name for name in wants if name not in has]
    unknown = [name for name in has if name not in wants]
    reshaped = [f"{name} is {has[name]} instead of {shape}" for name, shape in wants.items() if has.get(name, shape) != shape]
    parts = [(names, what) for names, what in ((missing, "missing"), (unknown, "unknown"), (reshaped, "of another shape")) if names]
    listed = (f"{len(names)} {what}: {', '.join(names[:3])}{', ...' if len(names) > 3 else ''}" for names, what in parts)
    return "; ".join(listed) or None


def sha256_of_each(names: Iterable[str], tensor_of: Callable[[str], Tensor]) -> dict[str, str]:
    """The SHA-256, in hexadecimal, of the bytes of each named tensor, which is contiguous and on the CPU; by several threads."""

    def sha256(name: str) -> str:
        # hashlib takes what offers its memory, which NumPy does for bytes, and PyTorch for no dtype.
        return hashlib.sha256(bytes_of(tensor_of(name)).numpy().data).hexdigest()

    listed = list(names)
    with ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1)) as threads:
        return dict(zip(listed, threads.map(sha256, listed), strict=True))


def sha256_of_text(text: str) -> str:
    """The SHA-256 of a text, in hexadecimal."""
    return hashlib.sha256(text.encode()).hexdigest()


def canonical(value: Any) -> str:
    """JSON in one way only: sorted keys, no spaces, ASCII."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def bytes_of(tensor: Tensor) -> Tensor:  # shape: (bytes,)
    """The bytes of a tensor, one after the other; a view where it is contiguous."""
    return tensor.detach().reshape(-1).view(torch.uint8)
