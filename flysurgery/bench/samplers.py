"""One sample of one candidate: the wall clock on the CPU, a captured graph or single launches on CUDA."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flysurgery.inference.clock import between_events, no_waiting

Run = Callable[[Tensor], Any]
Sample = Callable[[], float]

SAMPLE_MS = 2.0
"""Shortest sample on the CPU: faster candidates are called several times a sample."""

LONG_MS = 100.0
"""Calls on the CPU that take longer fill the caches by themselves, whatever ran before."""

CACHE_MULTIPLE = 3
"""On CUDA, the inputs that one sample goes through are together this many times larger than the L2 cache."""

MOST_INPUTS = 64
"""Inputs of one sample at most, so that capturing a whole model on a single image ends: its weights fill the cache anyway."""


def rotating(x: Tensor) -> list[Tensor]:
    """``x`` and copies of it, together larger than the L2 cache; on the CPU x alone.

    Copies are inference tensors where x is one, and no others: a compiler would make another graph for them, while the calls are captured.
    """
    if not x.is_cuda:
        return [x]
    cache_bytes = torch.cuda.get_device_properties(x.device).L2_cache_size
    copies = min(MOST_INPUTS - 1, CACHE_MULTIPLE * cache_bytes // max(1, x.nbytes))
    with torch.inference_mode(x.is_inference()):
        return [x, *(x.clone() for _ in range(copies))]


def cpu_sampler(run: Run, x: Tensor) -> Sample:
    """Milliseconds of one call by the wall clock, with the caches as its own last call left them."""

    def sample(calls: int) -> float:
        start = time.perf_counter()
        for _ in range(calls):
            run(x)
        return (time.perf_counter() - start) * 1e3 / calls

    def after_itself(calls: int) -> float:
        run(x)  # so that each finds the cache and the allocator as its own last call left them
        return sample(calls)

    if after_itself(1) > LONG_MS:
        return lambda: sample(1)
    calls = max(1, round(SAMPLE_MS / after_itself(1)))
    return lambda: after_itself(calls)


def eager_sampler(run: Run, inputs: list[Tensor]) -> Sample:
    """Milliseconds of one call, launched from Python one after the other, between two CUDA events."""

    def calls() -> None:
        for x in inputs:
            run(x)

    for _ in range(3):
        run(inputs[0])
    return between_events(calls, len(inputs))


def graph_sampler(run: Run, inputs: list[Tensor], pool: Any) -> Sample:
    """Milliseconds of one call within a captured graph that holds one call an input; raises as ``captured`` does."""
    return between_events(captured(run, inputs, pool).replay, len(inputs))


def captured(run: Run, inputs: list[Tensor], pool: Any) -> torch.cuda.CUDAGraph:
    """A graph of one call an input.

    The outputs of one graph all differ while it is captured, so that none is found in the cache. Graphs of one ``pool`` use the same
    memory one after the other; what they leave there is not to be read.

    Raises:
        RuntimeError: ``run`` waits for the device. It is found out before the capture, as one that fails leaves PyTorch's random
            numbers and its memory pool unusable.
    """
    stream = torch.cuda.Stream(inputs[0].device)
    stream.wait_stream(torch.cuda.current_stream(inputs[0].device))
    with torch.cuda.stream(stream):
        try:
            with no_waiting():
                run(inputs[0])
        except RuntimeError:  # the first call alone may wait
            run(inputs[0])
            with no_waiting():
                run(inputs[0])
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, pool=pool):
        outputs = [run(x) for x in inputs]
    del outputs
    return graph
