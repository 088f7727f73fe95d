"""The tensors of a model as a file holds them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from flysurgery.errors import CheckpointError, OptionError

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


@dataclass(frozen=True)
class Stored:
    """Tensors by name, each stored once, and the further names of those that a model uses twice."""

    tensors: Mapping[str, Tensor]
    aliases: Mapping[str, str]

    @property
    def nbytes(self) -> int:
        """Size of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())


def read_dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """The dtype that a name such as "bfloat16" means.

    Raises:
        OptionError: neither a floating-point dtype that checkpoints may hold nor the name of one.
    """
    if dtype is None or dtype in FLOAT_DTYPES.values():
        return dtype  # pyright: ignore[reportReturnType]
    if str(dtype) in FLOAT_DTYPES:
        return FLOAT_DTYPES[str(dtype)]
    raise OptionError(f"dtype must be one of {', '.join(FLOAT_DTYPES)}, got {dtype}")


def collect(tensors: Mapping[str, Tensor], dtype: torch.dtype | None) -> Stored:
    """The tensors on the CPU, contiguous, floating-point ones in ``dtype`` if it is given.

    Names of one and the same tensor give one stored tensor, under the first of them.

    Raises:
        CheckpointError: an entry that is no tensor, is on meta, has a dtype that files cannot hold, or a finite
            number that ``dtype`` cannot hold; the message names it.
    """
    stored: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    seen: dict[object, str] = {}
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise CheckpointError(f"{name} is no tensor but a {type(tensor).__name__}, which a checkpoint cannot hold")
        if tensor.is_meta:
            raise CheckpointError(f"{name} is on the meta device and has no values to save; load the weights first")
        if tensor.dtype not in SAFETENSORS_DTYPES.values() or tensor.layout != torch.strided:
            raise CheckpointError(f"{name} is a {tensor.layout} tensor of {tensor.dtype}, which a checkpoint cannot hold")
        identity = (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        if tensor.numel() and identity in seen:
            aliases[name] = seen[identity]
        else:
            seen[identity] = name
            stored[name] = _for_file(name, tensor, dtype)
    return Stored(stored, aliases)


def unstored_buffers(model: nn.Module) -> dict[str, Tensor]:
    """The buffers outside the state_dict, which the model's constructor computes, by name."""
    return {
        f"{prefix}.{name}" if prefix else name: buffer
        for prefix, module in model.named_modules(remove_duplicate=False)
        for name, buffer in module.named_buffers(recurse=False)
        if name in module._non_persistent_buffers_set
    }


def set_buffer(model: nn.Module, name: str, value: Tensor) -> None:
    """Put ``value`` in the place of a buffer outside the state_dict."""
    parent, _, attribute = name.rpartition(".")
    model.get_submodule(parent).register_buffer(attribute, value, persistent=False)


def single_float_dtype(dtypes: Mapping[str, torch.dtype]) -> torch.dtype | None:
    """The floating-point dtype that all floating-point tensors share, None where they differ or there are none."""
    found = {dtype for dtype in dtypes.values() if dtype.is_floating_point}
    return found.pop() if len(found) == 1 else None


def _for_file(name: str, tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    tensor = tensor.detach().cpu()
    cast = tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor
    if cast is not tensor and bool((torch.isfinite(tensor) & ~torch.isfinite(cast)).any()):
        raise CheckpointError(
            f"{name} has numbers beyond the range of {str(dtype).removeprefix('torch.')}; bfloat16 has the range of float32"
        )
    cast = cast.contiguous()
    # Views would write their neighbours' bytes too, and safetensors refuses tensors that share storage.
    return cast if cast.untyped_storage().nbytes() == cast.nbytes else cast.clone()
