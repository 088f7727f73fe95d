"""Interleaved timing: all candidates in every round, in a new order each time, so that drift hits all alike."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import quantiles

import torch
from torch import Tensor

SAMPLE_MS = 2.0
"""Shortest sample on the CPU: faster candidates are called several times a sample."""

CACHE_MULTIPLE = 3
"""On CUDA, the inputs that one sample goes through are together this many times larger than the L2 cache."""


@dataclass(frozen=True)
class Timing:
    """Milliseconds for one call: the median and the quartiles of all rounds."""

    median_ms: float
    lower_ms: float
    upper_ms: float

    @property
    def iqr_ms(self) -> float:
        """The interquartile range."""
        return self.upper_ms - self.lower_ms


def time_interleaved(
    candidates: Mapping[str, Callable[[Tensor], Tensor]],
    x: Tensor,
    *,
    rounds: int = 30,
    seed: int = 0,
) -> dict[str, Timing]:
    """Time each candidate on ``x``, with warm caches on the CPU and cold ones on CUDA.

    On the CPU by the wall clock, each sample after a call that is not timed. On CUDA each candidate is captured once as a graph,
    which runs it over copies of x larger together than the L2 cache, with all outputs kept, so that neither inputs nor outputs are
    found in the cache and the time of launching from Python does not count.
    """
    take_sample = {name: (_cuda_sampler if x.is_cuda else _cpu_sampler)(run, x) for name, run in candidates.items()}
    samples: dict[str, list[float]] = {name: [] for name in candidates}
    order, shuffle = list(candidates), random.Random(seed).shuffle
    for _ in range(rounds):
        shuffle(order)
        for name in order:
            samples[name].append(take_sample[name]())
    return {name: _summary(values) for name, values in samples.items()}


def _summary(samples: Sequence[float]) -> Timing:
    lower, median, upper = quantiles(samples, n=4, method="inclusive")
    return Timing(median, lower, upper)


def _cpu_sampler(run: Callable[[Tensor], Tensor], x: Tensor) -> Callable[[], float]:
    def sample(calls: int) -> float:
        run(x)  # so that each finds the cache and the allocator as its own last call left them
        start = time.perf_counter()
        for _ in range(calls):
            run(x)
        return (time.perf_counter() - start) * 1e3 / calls

    sample(1)
    calls = max(1, round(SAMPLE_MS / sample(1)))
    return lambda: sample(calls)


def _cuda_sampler(run: Callable[[Tensor], Tensor], x: Tensor) -> Callable[[], float]:
    cache_bytes = torch.cuda.get_device_properties(x.device).L2_cache_size
    inputs = [x.clone() for _ in range(1 + CACHE_MULTIPLE * cache_bytes // max(1, x.nbytes))]
    stream = torch.cuda.Stream(x.device)
    with torch.cuda.stream(stream):
        for _ in range(3):
            run(inputs[0])
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        outputs = [run(copy) for copy in inputs]
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    def sample() -> float:
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / len(outputs)

    sample()
    return sample
