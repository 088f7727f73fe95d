"""The precision that a measurement runs in, dense baseline included."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch.backends import cudnn

from flysurgery.errors import OptionError

MODES = {"fp32": torch.float32, "tf32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
"""The name of each mode and the dtype of its tensors. ``fp32`` and ``tf32`` differ in what CUDA may round products to."""


def modes_of(text: str, device: torch.device) -> tuple[str, ...]:
    """Read ``fp32,bf16``; ``all`` is every mode that the device knows.

    Raises:
        OptionError: an unknown mode, or TF32 away from CUDA.
    """
    known = tuple(mode for mode in MODES if device.type == "cuda" or mode != "tf32")
    found = known if text == "all" else tuple(part.strip() for part in text.split(",") if part.strip())
    for mode in found:
        if mode not in known:
            raise OptionError(f"there is no mode '{mode}' on {device.type}; choose from {', '.join(known)}")
    if not found:
        raise OptionError(f"expected modes such as fp32,bf16, got '{text}'")
    return found


@contextmanager
def in_mode(mode: str) -> Iterator[torch.dtype]:
    """Let float32 products and convolutions on CUDA use TF32 in mode ``tf32`` only, and set it back afterwards."""
    matmul, convolution = torch.backends.cuda.matmul, cast(Any, cudnn)
    before = matmul.allow_tf32, convolution.allow_tf32
    matmul.allow_tf32 = convolution.allow_tf32 = mode == "tf32"
    try:
        yield MODES[mode]
    finally:
        matmul.allow_tf32, convolution.allow_tf32 = before
