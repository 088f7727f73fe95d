"""A record of the kernels that a computation launches, for autotuning."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from torch import Tensor

from flysurgery.gpu.doubt import doubt
from flysurgery.gpu.table import TunedCase


class Tunable(Protocol):
    """Kernels with configurations to choose from."""

    device_index: int

    def cases(self, rows: int) -> list[TunedCase]:
        """The cases to autotune for calls with this many rows."""
        ...


_met: dict[tuple[Tunable, int], None] | None = None


def meet(kernels: Tunable, x: Tensor) -> None:
    """Record that kernels run on the rows of x, if a recording is active."""
    if _met is not None:
        _met[kernels, x.numel() // x.shape[-1]] = None


@contextmanager
def recording() -> Iterator[dict[tuple[Tunable, int], None]]:
    """Record the kernels that all threads run inside the block, in order."""
    global _met
    _met = {}
    doubt()  # a repeated call would record nothing
    try:
        yield _met
    finally:
        _met = None
