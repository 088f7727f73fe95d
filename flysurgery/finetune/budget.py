"""How many updates a run makes within a budget, and how often it is looked at."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain, count
from time import perf_counter

import torch

from flysurgery.finetune.batches import Batches
from flysurgery.finetune.step import Stepper

TIMED = 5
"""Updates at a rate of zero that tell how long one takes, after one that does not count."""

SPARED = 0.03
"""Share of what is left of the budget that the updates leave for everything else."""

LOOKS = 10
"""Moments at which a run without labels, or with a budget, is looked at."""

LOOKED = 0.2
"""Share of a budget that looks may take; where they take longer there are fewer."""


def looks_for(budget: float, each: float) -> int:
    """How many times to look, at least once, within a budget of seconds of which each look takes some."""
    return max(1, min(LOOKS, int(LOOKED * budget / max(each, 1e-9))))


def affordable(stepper: Stepper, batches: Batches, seconds: float, agreed: Callable[[float], float]) -> int:
    """How many updates fit into ``seconds``, from now on; at least one. The model and the optimizer stay as they are.

    ``agreed`` gives the mean of a number over all processes. Each update exchanges gradients, so all must make equally many here.
    """
    started = perf_counter()
    rows: Iterator[tuple[torch.Tensor, torch.Tensor]] = chain.from_iterable(batches.epoch(number, 0) for number in count())

    def timed(updates: int) -> float:
        """Seconds of one update, the mean of several."""
        begun = perf_counter()
        for _ in range(updates):
            stepper.update(rows, 0).tolist()  # reads from the device, so that it waits for it
        return (perf_counter() - begun) / updates

    with stepper.rehearsal():
        timed(1)
        each = agreed(timed(1))
        each = agreed(timed(max(1, min(TIMED, int(seconds / 10 / each)))))
    return max(1, int(agreed((seconds - (perf_counter() - started)) * (1 - SPARED) / each)))
