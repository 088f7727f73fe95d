"""The way of an inference operator: which launches compute it, one stage after the other, and with what."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor


class Stage(NamedTuple):
    """Launches that follow each other. An operator is a list of stages, each of which takes what the one before it gave.

    ``run`` takes that, the operator's x, and its other operands. It holds no tensors itself, as stages are remembered.
    """

    launches: tuple[str, ...]
    run: Callable[[Tensor, Tensor, Any], Tensor]


class Way(NamedTuple):
    """The stages of an operator, with the operands of one call."""

    stages: tuple[Stage, ...]
    x: Tensor
    operands: Any

    def launches(self) -> tuple[str, ...]:
        """What the launches compute, one after the other."""
        return tuple(launch for stage in self.stages for launch in stage.launches)

    def run(self) -> Tensor:
        """The operator's result."""
        y = self.x
        for stage in self.stages:
            y = stage.run(y, self.x, self.operands)
        return y
