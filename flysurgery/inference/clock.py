"""Finds the fastest of several ways by a short measurement. It serves a choice and is no benchmark."""

from __future__ import annotations

import random
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from typing import Any

import torch
from torch import Tensor

from flysurgery.ops import taking

Way = Callable[..., Any]
Shapes = tuple[tuple[int, ...], ...]

ROUNDS = 9
"""Samples of each way at least. Their median is one of the middle ones, so a few that something else delayed do not count."""
MOST_ROUNDS, OTHER_SECONDS = 101, 0.05
"""Elsewhere than on CUDA, short calls are timed more often: up to so many times, or so many seconds for each way."""
CACHE_MULTIPLE = 2
"""On CUDA, the inputs of one sample are together this many times larger than the L2 cache."""
MOST_COPIES = 64
"""The most inputs of one sample of a whole model. Its weights fill the cache anyway, and capturing hundreds of forwards takes long."""


MOST_BACKWARD = 4
"""The same for forward and backward, whose activations fill it as well."""


def random_inputs(shapes: Shapes, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """Tensors to time a group with, the same ones in every call."""
    generator = None if device.type == "meta" else torch.Generator(device).manual_seed(0)
    return [torch.randn(shape, generator=generator, dtype=dtype, device=device) for shape in shapes]


def medians_ms(
    ways: Sequence[Way], inputs: Sequence[Tensor], *, most_copies: int | None = None, captured: bool = True
) -> tuple[float, ...]:
    """Milliseconds of one call of each way. Every round times all of them, in a new order.

    On CUDA the calls are captured as graphs and run with cold caches; if one of them waits for the device, they are launched from Python.
    Elsewhere the wall clock is used.

    Args:
        most_copies: bounds the inputs of one sample, for ways whose weights fill the cache by themselves.
        captured: whether calls are captured where that is possible.
    """
    on_cuda = inputs[0].is_cuda
    samplers = _cuda_samplers(ways, inputs, most_copies, captured) if on_cuda else [_sampler(way, inputs) for way in ways]
    times: list[list[float]] = [[] for _ in ways]
    order, shuffle = list(range(len(ways))), random.Random(0).shuffle
    rounds, started = 0, time.perf_counter()
    while rounds < ROUNDS or (not on_cuda and rounds < MOST_ROUNDS and time.perf_counter() - started < OTHER_SECONDS * len(ways)):
        rounds += 1
        shuffle(order)
        for index in order:
            times[index].append(samplers[index]())
    return tuple(median(each) for each in times)


def _sampler(way: Way, inputs: Sequence[Tensor]) -> Callable[[], float]:
    def sample() -> float:
        start = time.perf_counter()
        way(*inputs)
        return (time.perf_counter() - start) * 1e3

    sample()
    return sample


def _cuda_samplers(ways: Sequence[Way], inputs: Sequence[Tensor], most_copies: int | None, captured: bool) -> list[Callable[[], float]]:
    device = inputs[0].device
    cache_bytes = torch.cuda.get_device_properties(device).L2_cache_size
    count = 1 + CACHE_MULTIPLE * cache_bytes // max(1, sum(each.nbytes for each in inputs))
    copies = [tuple(each.clone() for each in inputs) for _ in range(min(count, most_copies or count))]
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for way in ways:
            for _ in range(2):
                way(*copies[0])
        waiting = not captured or any(_waits(way, copies[0]) for way in ways)
    stream.synchronize()
    pool = torch.cuda.graph_pool_handle()
    works = [_eager(way, copies) if waiting else _captured(way, copies, stream, pool) for way in ways]
    samplers = [between_events(work, len(copies)) for work in works]
    for sample in samplers:
        sample()
    return samplers


def _waits(way: Way, inputs: Sequence[Tensor]) -> bool:
    """Whether a call waits for the device, so that no graph can hold it. Checked before a capture, because a failed one does damage."""
    with no_waiting():
        try:
            way(*inputs)
        except RuntimeError:
            return True
    return False


@contextmanager
def no_waiting() -> Iterator[None]:
    """Let operations that wait for the device raise."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch warns that this is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def _eager(way: Way, copies: Sequence[tuple[Tensor, ...]]) -> Callable[[], None]:
    def work() -> None:
        for each in copies:
            way(*each)

    return work


def _captured(way: Way, copies: Sequence[tuple[Tensor, ...]], stream: torch.cuda.Stream, pool: Any) -> Callable[[], None]:
    """A graph of one call for each of the copies. Graphs of one pool share memory, so their results must not be read."""
    graph = torch.cuda.CUDAGraph()
    with taking(), torch.cuda.graph(graph, stream=stream, pool=pool):
        results = [way(*each) for each in copies]
    del results
    return graph.replay


def between_events(work: Callable[[], None], calls: int) -> Callable[[], float]:
    """Milliseconds of one call, where ``work`` is a number of calls on CUDA's current stream."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    def sample() -> float:
        start.record()
        work()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / calls

    return sample
