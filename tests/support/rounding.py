"""How PyTorch's own products of float32 round, which are what kernels are compared with."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def rounding_as(mode: str) -> Iterator[None]:
    """Let them take TF32 where the mode is ``"tf32"``, and only there."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if mode == "tf32" else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
