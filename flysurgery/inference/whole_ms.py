"""The times of a whole model: dense, optimized dense, and converted by a plan."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from flysurgery.inference import clock
from flysurgery.inference.measuring import random_variant
from flysurgery.inference.optimize import optimize
from flysurgery.inference.whole import MOST_COPIES
from flysurgery.surgery import Plan
from flysurgery.walker import shadow


@dataclass(frozen=True)
class WholeTimes:
    """Milliseconds of one forward of the whole model; ``dense_optimized_ms`` is None where dense was not optimized."""

    dense_ms: float
    dense_optimized_ms: float | None
    converted_ms: float

    @property
    def reference_ms(self) -> float:
        """The fastest time of dense."""
        return self.dense_ms if self.dense_optimized_ms is None else min(self.dense_ms, self.dense_optimized_ms)


class WholeTimer:
    """Times the models that plans make of ``dense``, with random weights, beside dense."""

    def __init__(self, dense: nn.Module, example: Tensor, *, optimized: bool) -> None:
        self.example = example
        self._dense, self._optimized = dense, optimized
        self._references = [dense]
        if optimized:
            self._references.append(shadow(dense))
            optimize(self._references[1], example)

    def times(self, plan: Plan) -> WholeTimes:
        """The times of dense, of optimized dense and of the plan's model, taken in turns."""
        converted = random_variant(plan, self._dense)
        if self._optimized:
            optimize(converted, self.example)
        with torch.no_grad():
            *dense_ms, converted_ms = clock.medians_ms([*self._references, converted], (self.example,), most_copies=MOST_COPIES)
        return WholeTimes(dense_ms[0], dense_ms[1] if self._optimized else None, converted_ms)
