"""A record of the kernels that a computation meets, for autotuning."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from torch import Tensor

from flysurgery.ops.cuda.notes import forget_notes
from flysurgery.ops.cuda.table import TunedCase


class Tunable(Protocol):
    """Kernels with configurations to choose from."""

    device_index: int

    def cases(self, rows: int) -> list[TunedCase]:
        """What to autotune for calls of so many rows."""
        ...


_met: dict[tuple[Tunable, int], None] | None = None


def meet(kernels: Tunable, x: Tensor) -> None:
    """Note that kernels run on the rows of x, where somebody records it."""
    if _met is not None:
        _met[kernels, x.numel() // x.shape[-1]] = None


@contextmanager
def recording() -> Iterator[dict[tuple[Tunable, int], None]]:
    """Collect what is met inside the block, by all threads, in order."""
    global _met
    _met = {}
    forget_notes()  # calls that are noted meet nothing
    try:
        yield _met
    finally:
        _met = None
