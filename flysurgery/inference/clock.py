"""Times ways to compute one thing, in turns; finds the fastest of several by a short measurement, also with gradients."""

import random
import time
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from flysurgery.ops import taking

Way = Callable[..., Any]
Shapes = tuple[tuple[int, ...], ...]
Sample = Callable[[], float]
"""Takes one sample; gives the milliseconds of one call."""

ROUNDS = 9
"""Samples of each way at least. Their median is one of the middle ones, so a few that something else delayed do not count."""
MOST_ROUNDS, OTHER_SECONDS = 101, 0.05
"""Elsewhere than on CUDA, short calls are timed more often: each way up to so many times, or so many seconds."""
CACHE_MULTIPLE = 2
"""On CUDA, the inputs of one sample are together this many times larger than the L2 cache."""
MOST_CALLS = 512
"""The most inputs of one sample: capturing the calls of thousands of small ones would take minutes."""
MOST_COPIES = 64
"""The same for a whole model, or a group forward and backward, whose weights or gradients fill the cache anyway."""
MOST_BACKWARD = 4
"""The same for a whole model forward and backward, whose activations fill it as well."""


def random_inputs(shapes: Shapes, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """Tensors to time a group with, the same ones in every call."""
    generator = None if device.type == "meta" else torch.Generator(device).manual_seed(0)
    return [torch.randn(shape, generator=generator, dtype=dtype, device=device) for shape in shapes]


def medians_ms(ways: Sequence[Way], inputs: Sequence[Tensor], *, most_copies: int = MOST_CALLS, captured: bool = True) -> tuple[float, ...]:
    """Milliseconds of one call of each way. Every round times all of them, in a new order.

    On CUDA the calls, for at most ``most_copies`` inputs in a sample, run with cold caches. They are ``captured`` as graphs; if one of
    them waits for the device, all are launched from Python. Elsewhere the wall clock is used.
    """
    if not inputs[0].is_cuda:
        samples = in_turns([_sampler(way, inputs) for way in ways], MOST_ROUNDS, fewest=ROUNDS, seconds=OTHER_SECONDS)
        return tuple(map(median, samples))
    count = copies_beyond_cache(inputs, CACHE_MULTIPLE, most_copies)
    copies = [tuple(each.clone() for each in inputs) for _ in range(count)]
    stream, pool = _stream_beside(inputs[0].device), torch.cuda.graph_pool_handle()
    by_graph = captured and not any(_waits(way, copies[0], stream) for way in ways)
    with taking():
        works = [_captured(way, copies, stream, pool) if by_graph else _one_by_one(way, copies) for way in ways]
    samplers = [between_events(work, count) for work in works]
    for sample in samplers:
        sample()
    return tuple(map(median, in_turns(samplers, ROUNDS)))


def in_turns(samplers: Sequence[Sample], rounds: int, *, fewest: int = 1, seconds: float | None = None, seed: int = 0) -> list[list[float]]:
    """The samples of each: every round takes one of all, in a new order, so that drift affects all alike.

    One that has taken longer than ``seconds`` altogether and has ``fewest`` samples gets no more.
    """
    samples, spent = [list[float]() for _ in samplers], [0.0] * len(samplers)
    order, shuffle = list(range(len(samplers))), random.Random(seed).shuffle
    for _ in range(rounds):
        shuffle(order)
        for index in order:
            if seconds is not None and spent[index] > seconds and len(samples[index]) >= fewest:
                continue
            start = time.perf_counter()
            samples[index].append(samplers[index]())
            spent[index] += time.perf_counter() - start
    return samples


def _sampler(way: Way, inputs: Sequence[Tensor]) -> Sample:
    def sample() -> float:
        start = time.perf_counter()
        way(*inputs)
        return (time.perf_counter() - start) * 1e3

    sample()
    return sample


def copies_beyond_cache(inputs: Sequence[Tensor], multiple: int, most: int) -> int:
    """How many copies of CUDA inputs are together ``multiple`` times larger than the L2 cache, and one more; at most ``most``."""
    cache_bytes = torch.cuda.get_device_properties(inputs[0].device).L2_cache_size
    count = 1 + multiple * cache_bytes // max(1, sum(each.nbytes for each in inputs))
    return min(count, most)


def all_calls(way: Way, inputs: Sequence[Sequence[Tensor]], launch: str, pool: Any) -> tuple[Callable[[], None], str]:
    """Give one call for each of the CUDA inputs as one piece of work, and how it is launched.

    That is the replay of a captured graph where ``launch`` is ``graph`` and ``way`` can be captured, and single launches elsewhere.
    """
    if launch == "graph":
        stream = _stream_beside(inputs[0][0].device)
        try:
            if not _waits(way, inputs[0], stream):
                return _captured(way, inputs, stream, pool), "graph"
        except RuntimeError:  # a graph cannot hold one of its operations
            torch.cuda.synchronize()
    return _one_by_one(way, inputs), "eager"


def _one_by_one(way: Way, inputs: Sequence[Sequence[Tensor]]) -> Callable[[], None]:
    def calls() -> None:
        for each in inputs:
            way(*each)

    for _ in range(3):
        way(*inputs[0])
    return calls


def _waits(way: Way, inputs: Sequence[Tensor], stream: torch.cuda.Stream) -> bool:
    """Whether a call, not one of the first, waits for the device, so that no graph can hold it.

    This is checked before a capture, because a failed one leaves PyTorch's random numbers and its memory pool unusable.
    """
    waits = False
    with torch.cuda.stream(stream):
        for _ in range(2):
            way(*inputs)
        with no_waiting():
            try:
                way(*inputs)
            except RuntimeError:
                waits = True
    stream.synchronize()
    return waits


def _captured(way: Way, inputs: Sequence[Sequence[Tensor]], stream: torch.cuda.Stream, pool: Any) -> Callable[[], None]:
    """The replay of a graph of one call for each input, whose outputs lie in different places, so that none is found in the cache.

    Graphs of one ``pool`` use the same memory one after the other, so their outputs must not be read.
    """
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, pool=pool):
        results = [way(*each) for each in inputs]
    del results
    return graph.replay


def _stream_beside(device: torch.device) -> torch.cuda.Stream:
    """Another stream, which goes on where the current one is."""
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    return stream


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


def between_events(work: Callable[[], None], calls: int) -> Sample:
    """Milliseconds of one call, where ``work`` is a number of calls on CUDA's current stream."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    def sample() -> float:
        start.record()
        work()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / calls

    return sample


def with_gradients(call: Way, modules: nn.Module, images: Collection[torch.Size]) -> Way:
    """``call``, and the gradients of its inputs, but of ``images``' shapes, and of the modules' parameters that learn, from ones."""
    held = [tensor for each in getattr(modules, "held", ()) if (tensor := getattr(*each)) is not None]
    parameters = [*modules.parameters(), *held]

    def run(*inputs: Tensor) -> object:
        with torch.enable_grad():
            given = [each.detach().requires_grad_(each.is_floating_point() and each.shape not in images) for each in inputs]
            leaves = [each for each in pytree.tree_leaves(call(*given)) if isinstance(each, Tensor) and each.requires_grad]
        wanted = [each for each in (*given, *parameters) if each.requires_grad]
        return torch.autograd.grad(leaves, wanted, [torch.ones_like(each) for each in leaves], allow_unused=True)

    return run


@contextmanager
def rehearsed(model: nn.Module) -> Iterator[None]:
    """A block after which the model and random states are as before, whatever forwards and backwards in training mode did to them.

    Inside, other parameters share the memory of the model's own, whose graphs, hooks and streams of earlier passes stay out of it, and so
    does autocast's cache.
    """
    cached = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    torch.clear_autocast_cache()
    before = [(buffer, buffer.clone()) for buffer in model.buffers()]
    own = [(module, name, each) for module in model.modules() for name, each in module._parameters.items() if each is not None]
    others = {id(each): nn.Parameter(each.detach(), each.requires_grad) for _, _, each in own}
    for module, name, each in own:
        module._parameters[name] = others[id(each)]
    try:
        with torch.random.fork_rng(devices={each.device.index for each in model.parameters() if each.is_cuda}):
            yield
    finally:
        torch.set_autocast_cache_enabled(cached)
        for module, name, each in own:
            module._parameters[name] = each
        with torch.no_grad():
            for buffer, value in before:
                if not buffer.is_meta and not torch.equal(buffer, value):
                    buffer.copy_(value)
