"""Times candidates in one precision and one run: every round has all of them, in a new order, so that drift affects all alike."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from statistics import quantiles
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.backends import cudnn

from flysurgery.errors import OptionError
from flysurgery.gpu.modes import MODES
from flysurgery.inference.clock import Sample, all_calls, between_events, copies_beyond_cache, in_turns

Run = Callable[[Tensor], Any]

TIMED_MODES = {mode: MODES[mode] for mode in ("fp32", "tf32", "fp16", "bf16")}
"""The name of each mode and the dtype of its tensors. ``fp32`` and ``tf32`` differ in what CUDA may round products to."""

FEWEST_ROUNDS = 3  # samples of each candidate, however long they take
STEADY = 0.01  # the clocks are steady when two rounds in a row differ by less than this share
WARM_UP_SECONDS = 1.0  # the longest warm-up; where the samples get less time, so does the warm-up
SAMPLE_MS = 2.0  # the shortest sample on the CPU: faster candidates are called several times a sample
LONG_MS = 100.0  # calls on the CPU that take longer than this fill the caches themselves, whatever ran before
CACHE_MULTIPLE = 3  # on CUDA, the inputs of one sample are together this many times larger than the L2 cache
MOST_INPUTS = 64  # of one sample; bounds the capture of a whole model on one image, whose weights fill the cache anyway


class Timing(NamedTuple):
    """Milliseconds of one call: the median of all rounds, and the range between their quartiles. ``launch`` is ``graph`` or ``eager``."""

    median_ms: float
    iqr_ms: float
    launch: str = "eager"


def time_interleaved(
    candidates: Mapping[str, Run],
    x: Tensor | Mapping[str, Tensor],
    *,
    rounds: int = 30,
    seconds: float | None = None,
    launch: str = "graph",
    seed: int = 0,
) -> dict[str, Timing]:
    """Time each candidate on ``x``, with warm caches on the CPU and cold caches on CUDA.

    On the CPU the wall clock is used, and an untimed call precedes each sample. On CUDA each candidate runs over copies of x that are
    together larger than the L2 cache, so that neither inputs nor outputs are found there. ``launch="graph"`` replays a captured graph,
    which leaves out the time of launching from Python; ``"eager"`` launches the calls one by one. A candidate that cannot be captured is
    launched one by one, and its ``Timing`` says so. On CUDA sampling starts when the clocks are steady.

    ``x`` is one input for all, or one for each candidate by its name. A candidate gets at most ``rounds`` samples, and none after
    ``seconds`` but the ``FEWEST_ROUNDS``.
    """
    inputs = x if isinstance(x, Mapping) else dict.fromkeys(candidates, x)
    on_cuda = any(each.is_cuda for each in inputs.values())
    pool = torch.cuda.graph_pool_handle() if on_cuda and launch == "graph" else None
    copies: dict[int, list[tuple[Tensor]]] = {}
    samplers: dict[str, Sample] = {}
    launches: dict[str, str] = {}
    for name, run in candidates.items():
        own = inputs[name]
        if not own.is_cuda:
            samplers[name], launches[name] = sampler_by_clock(run, own), "eager"
            continue
        if id(own) not in copies:
            copies[id(own)] = rotating(own)
        calls, launches[name] = all_calls(run, copies[id(own)], launch, pool)
        samplers[name] = between_events(calls, len(copies[id(own)]))
    if on_cuda:
        _warm_up(list(samplers.values()), WARM_UP_SECONDS if seconds is None else min(WARM_UP_SECONDS, seconds * len(samplers)))
    samples = in_turns(list(samplers.values()), rounds, fewest=FEWEST_ROUNDS, seconds=seconds, seed=seed)
    found: dict[str, Timing] = {}
    for name, values in zip(samplers, samples, strict=True):
        lower, middle, upper = quantiles(values, n=4, method="inclusive")
        found[name] = Timing(middle, upper - lower, launches[name])
    return found


def _warm_up(samplers: Sequence[Sample], seconds: float) -> None:
    """Sample until two rounds in a row take the same time, or until the seconds are over."""
    end, before, now = time.perf_counter() + seconds, 0.0, sum(sample() for sample in samplers)
    while time.perf_counter() < end and abs(now - before) > STEADY * now:
        before, now = now, sum(sample() for sample in samplers)


def rotating(x: Tensor) -> list[tuple[Tensor]]:
    """Give ``x`` on CUDA and copies of it, each as the inputs of one call, together larger than the L2 cache.

    Copies of an inference tensor are inference tensors: a compiler would make another graph for any others during the capture.
    """
    with torch.inference_mode(x.is_inference()):
        return [(x,), *((x.clone(),) for _ in range(copies_beyond_cache((x,), CACHE_MULTIPLE, MOST_INPUTS) - 1))]


def sampler_by_clock(run: Run, x: Tensor) -> Sample:
    """Sample one call by the wall clock, with the caches as its own last call left them: on a CPU, or a GPU without CUDA."""

    def sample(calls: int) -> float:
        synchronize(x.device)
        start = time.perf_counter()
        for _ in range(calls):
            run(x)
        synchronize(x.device)
        return (time.perf_counter() - start) * 1e3 / calls

    def after_itself(calls: int) -> float:
        run(x)  # leaves the cache and the allocator as a call of this candidate finds them in use
        return sample(calls)

    if after_itself(1) > LONG_MS:
        return lambda: sample(1)
    calls = max(1, round(SAMPLE_MS / after_itself(1)))
    return lambda: after_itself(calls)


def synchronize(device: torch.device) -> None:
    """Wait for a GPU, of whatever kind; calls on a CPU end when they return."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def modes_of(text: str, device: torch.device) -> tuple[str, ...]:
    """Read modes such as ``fp32,bf16``; ``all`` is every mode. Only CUDA has TF32. Raises ``OptionError`` for any other."""
    known = tuple(mode for mode in TIMED_MODES if mode != "tf32" or device.type == "cuda")
    found = known if text == "all" else tuple(part.strip() for part in text.split(",") if part.strip())
    for mode in found:
        if mode not in known:
            raise OptionError(f"there is no mode '{mode}' on {device.type}; choose from {', '.join(known)}")
    if not found:
        raise OptionError(f"expected modes such as fp32,bf16, got '{text}'")
    return found


@contextmanager
def in_mode(mode: str) -> Iterator[torch.dtype]:
    """Let float32 products and convolutions on CUDA use TF32 in mode ``tf32`` only, and set it back afterwards."""
    matmul, convolution = torch.backends.cuda.matmul, cast(Any, cudnn)
    before = matmul.allow_tf32, convolution.allow_tf32
    matmul.allow_tf32 = convolution.allow_tf32 = mode == "tf32"
    try:
        yield TIMED_MODES[mode]
    finally:
        matmul.allow_tf32, convolution.allow_tf32 = before
