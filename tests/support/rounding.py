"""Settings of PyTorch: how its own products of float32 round, which kernels are compared with, and what new memory holds."""

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


@contextmanager
def fresh_memory_is_nan() -> Iterator[None]:
    """Let PyTorch fill what ``torch.empty`` gives with NaN, so that an element that nobody writes shows."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
