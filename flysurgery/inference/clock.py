"""Which of two ways is faster here: a short measurement for a choice, no benchmark."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median

import torch
from torch import Tensor

CUDA_ROUNDS, OTHER_ROUNDS = 9, 3
CACHE_MULTIPLE = 2
"""On CUDA, the inputs that one sample goes through are together this many times larger than the L2 cache."""


def medians_ms(ways: Sequence[Callable[..., Tensor]], inputs: Sequence[Tensor]) -> tuple[float, ...]:
    """Milliseconds of one call of each, taken in turns; on CUDA captured as graphs and with cold caches, elsewhere by the wall clock."""
    on_cuda = inputs[0].is_cuda
    samplers = [(_cuda_sampler if on_cuda else _sampler)(way, inputs) for way in ways]
    rounds = [[sample() for sample in samplers] for _ in range(CUDA_ROUNDS if on_cuda else OTHER_ROUNDS)]
    return tuple(median(column) for column in zip(*rounds, strict=True))


def _sampler(way: Callable[..., Tensor], inputs: Sequence[Tensor]) -> Callable[[], float]:
    def sample() -> float:
        start = time.perf_counter()
        way(*inputs)
        return (time.perf_counter() - start) * 1e3

    sample()
    return sample


def _cuda_sampler(way: Callable[..., Tensor], inputs: Sequence[Tensor]) -> Callable[[], float]:
    device = inputs[0].device
    cache_bytes = torch.cuda.get_device_properties(device).L2_cache_size
    size = max(1, sum(each.nbytes for each in inputs))
    copies = [tuple(each.clone() for each in inputs) for _ in range(1 + CACHE_MULTIPLE * cache_bytes // size)]
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for _ in range(3):
            way(*copies[0])
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        results = [way(*each) for each in copies]
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    def sample() -> float:
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / len(results)

    sample()
    return sample
