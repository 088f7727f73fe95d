"""The precision that a measurement runs in, dense baseline included."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch.backends import cudnn

from flysurgery.errors import OptionError
from flysurgery.ops.cuda.modes import MODES

TIMED_MODES = {mode: MODES[mode] for mode in ("fp32", "tf32", "fp16", "bf16")}
"""The name of each mode and the dtype of its tensors. ``fp32`` and ``tf32`` differ in what CUDA may round products to."""


def modes_of(text: str, device: torch.device) -> tuple[str, ...]:
    """Read ``fp32,bf16``; ``all`` is every mode that the device knows.

    Raises:
        OptionError: an unknown mode, or one that the device has not.
    """
    known = _known_modes(device)
    found = known if text == "all" else tuple(part.strip() for part in text.split(",") if part.strip())
    for mode in found:
        if mode not in known:
            raise OptionError(f"there is no mode '{mode}' on {device.type}; choose from {', '.join(known)}")
    if not found:
        raise OptionError(f"expected modes such as fp32,bf16, got '{text}'")
    return found


def _known_modes(device: torch.device) -> tuple[str, ...]:
    """TF32 is CUDA's alone, and GPUs before compute capability 8.0 have neither it nor bfloat16: they would time something else."""
    if device.type != "cuda":
        return "fp32", "fp16", "bf16"
    return tuple(TIMED_MODES) if torch.cuda.get_device_capability(device) >= (8, 0) else ("fp32", "fp16")


@contextmanager
def in_mode(mode: str) -> Iterator[torch.dtype]:
    """Let float32 products and convolutions on CUDA use TF32 in mode ``tf32`` only, and set it back afterwards."""
    matmul, convolution = torch.backends.cuda.matmul, cast(Any, cudnn)
    before = matmul.allow_tf32, convolution.allow_tf32
    matmul.allow_tf32 = convolution.allow_tf32 = mode == "tf32"
    try:
        yield TIMED_MODES[mode]
    finally:
        matmul.allow_tf32, convolution.allow_tf32 = before
