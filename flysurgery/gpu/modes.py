"""Which arithmetic a kernel uses, from the dtype of x and PyTorch's own switches; its macros; and float32 as halves."""

from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from flysurgery.errors import BackendError
from flysurgery.torch_state import tf32_allowed

HALF_MODES = {torch.float16: "fp16", torch.bfloat16: "bf16"}
HALVES = frozenset(HALF_MODES.values())
MODES = {"fp16": torch.float16, "bf16": torch.bfloat16, "tf32": torch.float32, "fp32": torch.float32}
"""Each mode, and the dtype of x that it takes."""

MODE_NUMBERS = {mode: number for number, mode in enumerate(MODES)}
"""The macro ``MODE`` of a kernel that computes in several modes."""

DTYPE_NUMBERS = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2}
"""The macro ``MODE`` of a kernel that asks for the dtype of x alone."""

ACTIVATIONS = ("none", "gelu", "gelu_tanh", "silu")
"""In the order of the macro ``ACTIVATION``."""


def macros(sizes: Any = None, **options: Any) -> dict[str, int]:
    """The fields of a dataclass and further options as a kernel's macros: names in capitals, modes, dtypes and activations by number."""
    named = {each.name: getattr(sizes, each.name) for each in fields(sizes)} if sizes is not None else {}
    return {name.upper(): _number(value) for name, value in (named | options).items()}


class OfMode:
    """What the mode of a tiling decides."""

    mode: str

    @property
    def element_bytes(self) -> int:
        """Bytes of an element of x."""
        return 2 if self.mode in HALVES else 4

    @property
    def images(self) -> int:
        """Images of the weights: hi and lo where fp32 is split in pairs."""
        return 2 if self.mode == "fp32" else 1


def _number(value: Any) -> int:
    if isinstance(value, torch.dtype):
        return DTYPE_NUMBERS[value]
    if isinstance(value, str):
        return MODE_NUMBERS[value] if value in MODES else ACTIVATIONS.index(value)
    return int(value)


def mode_of(dtype: torch.dtype, *, allow_tf32: bool) -> str | None:
    """The kernels' mode for inputs of a dtype, None where there is none.

    ``fp16`` and ``bf16`` sum in float32. For float32 inputs: ``fp32`` reaches float32's grade of error on tensor cores, by pairs of
    fp16; ``tf32`` rounds inputs to 11 bits where the user allows it.
    """
    if dtype == torch.float32:
        return "tf32" if allow_tf32 else "fp32"
    return HALF_MODES.get(dtype)


def current_mode(dtype: torch.dtype) -> str | None:
    """``mode_of`` a dtype under PyTorch's present settings."""
    return mode_of(dtype, allow_tf32=dtype == torch.float32 and tf32_allowed())


def mode_for(x: Tensor) -> str:
    """``current_mode`` of x, whose dtype kernels take."""
    mode = current_mode(x.dtype)
    assert mode is not None, "other dtypes have been refused"
    return mode


def dtype_of(mode: str) -> torch.dtype:
    """The dtype of x that a mode takes.

    Raises:
        BackendError: there is no such mode.
    """
    if mode not in MODES:
        raise BackendError(f"the CUDA kernels have the modes {', '.join(MODES)}, got '{mode}'")
    return MODES[mode]


def in_halves(values: Tensor, images: int, half: torch.dtype = torch.float16) -> list[Tensor]:
    """Float32 values rounded to halves, as the first image; what that leaves, rounded too, as the second where there are two."""
    high = values.to(half)
    return [high] if images == 1 else [high, (values - high.float()).to(half)]


WEIGHT_EXPONENT = 11
"""Scaled weights have their largest entry in [2^10, 2^11), so that sums stay in range and low parts are precise."""

WEIGHT_SHIFT = 13  # kWeightShift of the kernels


def scaled_rows(weight: Tensor) -> tuple[Tensor, Tensor]:  # shapes: (outputs, inputs) float32 -> the same, (outputs,) int32
    """Each output's weights times the power of two that brings the largest finite one to [2^11, 2^12), or near; and the exponents."""
    largest = torch.where(weight.isfinite(), weight.abs(), 0.0).amax(dim=1, keepdim=True)
    exponent = (WEIGHT_EXPONENT + 1 - torch.frexp(largest).exponent).clamp(-114, 123)
    return torch.ldexp(weight, exponent), exponent[:, 0]
