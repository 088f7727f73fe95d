"""Interleaved timing: all candidates in every round, in a new order each time, so that drift hits all alike."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import quantiles

import torch
from torch import Tensor

from flysurgery.bench.samplers import Run, Sample, cpu_sampler, eager_sampler, graph_sampler, rotating

FEWEST_ROUNDS = 3
"""Samples of each candidate at least, however long they take."""

STEADY = 0.01
"""Two rounds in a row whose sum of samples differs by less: the clocks are steady."""

WARM_UP_SECONDS = 1.0
"""Longest warm-up; where the samples have less time, it has no more than they."""


@dataclass(frozen=True)
class Timing:
    """Milliseconds for one call: the median and the quartiles of all rounds. ``launch`` is ``graph`` or ``eager``."""

    median_ms: float
    lower_ms: float
    upper_ms: float
    launch: str = "eager"

    @property
    def iqr_ms(self) -> float:
        """The interquartile range."""
        return self.upper_ms - self.lower_ms


def time_interleaved(
    candidates: Mapping[str, Run],
    x: Tensor | Mapping[str, Tensor],
    *,
    rounds: int = 30,
    seconds: float | None = None,
    launch: str = "graph",
    seed: int = 0,
) -> dict[str, Timing]:
    """Time each candidate on ``x``, with warm caches on the CPU and cold ones on CUDA.

    On the CPU by the wall clock, each sample after a call that is not timed. On CUDA each candidate runs over copies of x larger
    together than the L2 cache, so that neither inputs nor outputs are found there: in a captured graph, where the time of
    launching from Python does not count (``launch="graph"``), or launched one by one (``"eager"``). A candidate that cannot be captured
    is launched one by one, and its ``Timing`` says so. On CUDA nothing counts before the clocks are steady.

    Args:
        x: one input for all, or one for each candidate by its name.
        rounds: samples of each candidate at most.
        seconds: time for the samples of one candidate; after it a candidate that has ``FEWEST_ROUNDS`` samples gets no more.
    """
    inputs = dict(x) if isinstance(x, Mapping) else dict.fromkeys(candidates, x)
    samplers, launches = _samplers(candidates, inputs, launch)
    if any(each.is_cuda for each in inputs.values()):
        _warm_up(list(samplers.values()), WARM_UP_SECONDS if seconds is None else min(WARM_UP_SECONDS, seconds * len(samplers)))
    samples: dict[str, list[float]] = {name: [] for name in candidates}
    spent = dict.fromkeys(candidates, 0.0)
    order, shuffle = list(candidates), random.Random(seed).shuffle
    for _ in range(rounds):
        shuffle(order)
        for name in order:
            if seconds is not None and spent[name] > seconds and len(samples[name]) >= FEWEST_ROUNDS:
                continue
            start = time.perf_counter()
            samples[name].append(samplers[name]())
            spent[name] += time.perf_counter() - start
    return {name: _summary(values, launches[name]) for name, values in samples.items()}


def _samplers(candidates: Mapping[str, Run], inputs: Mapping[str, Tensor], launch: str) -> tuple[dict[str, Sample], dict[str, str]]:
    samplers: dict[str, Sample] = {}
    launches: dict[str, str] = {}
    copies: dict[int, list[Tensor]] = {}
    pool = torch.cuda.graph_pool_handle() if launch == "graph" and any(x.is_cuda for x in inputs.values()) else None
    for name, run in candidates.items():
        x = inputs[name]
        if not x.is_cuda:
            samplers[name], launches[name] = cpu_sampler(run, x), "eager"
            continue
        rotation = copies.get(id(x)) or copies.setdefault(id(x), rotating(x))
        if launch == "graph":
            try:
                samplers[name], launches[name] = graph_sampler(run, rotation, pool), "graph"
                continue
            except RuntimeError:  # an operation that waits for the device
                torch.cuda.synchronize()
        samplers[name], launches[name] = eager_sampler(run, rotation), "eager"
    return samplers, launches


def _warm_up(samplers: Sequence[Sample], seconds: float) -> None:
    """Run all once, and on until two rounds in a row take the same time, or the seconds are over."""
    end, before, now = time.perf_counter() + seconds, 0.0, sum(sample() for sample in samplers)
    while time.perf_counter() < end and abs(now - before) > STEADY * now:
        before, now = now, sum(sample() for sample in samplers)


def _summary(samples: Sequence[float], launch: str) -> Timing:
    lower, median, upper = quantiles(samples, n=4, method="inclusive")
    return Timing(median, lower, upper, launch)
