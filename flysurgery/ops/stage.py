"""One step of an inference operator: what its launches compute, and how they are run."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor


class Stage(NamedTuple):
    """Launches that follow each other. An operator is a list of stages, each of which takes what the one before it gave."""

    launches: tuple[str, ...]
    run: Callable[[Tensor], Tensor]
