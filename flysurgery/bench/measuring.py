"""Check, then time, candidates for one computation: no time without a right result, and no row without its noise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from flysurgery.bench.ceilings import Ceilings, Work
from flysurgery.bench.samplers import Run
from flysurgery.bench.timing import Timing, time_interleaved

WORST_ERROR = 16.0
"""A result whose rms error exceeds that of the baseline by more than this factor is wrong, and gets no time."""

MOST_ERROR = 0.05
"""A result that is further off than this computes something else, in any mode and whatever the baseline gives."""

NOISE = {"cuda": 0.03, "cpu": 0.10}
"""By how much the times of two identical candidates may differ; rows of a run where they differ by more say noisy."""

AGAIN = " again"
"""What the name of the baseline's twin adds to the baseline's."""


@dataclass(frozen=True)
class Measured:
    """What is known about one candidate; times are None where ``status`` says why.

    ``status`` is "ok", "noisy: ...", "wrong: ..." or the reason why it did not run. ``launch`` is how it was launched.
    ``error`` is the rms error against float64, over the rms of the result. ``noise`` is by how much two identical baselines of
    this run differ. ``bytes_moved`` and ``flops`` are what the computation must spend, ``bound_ms`` the time that the ceilings of
    this run allow for it, and ``share_of_bound`` the part of the measured time that it is.
    """

    launch: str
    status: str
    error: float | None = None
    noise: float | None = None
    median_ms: float | None = None
    iqr_ms: float | None = None
    ratio_to_dense: float | None = None
    bytes_moved: int | None = None
    flops: int | None = None
    bound_ms: float | None = None
    share_of_bound: float | None = None


@dataclass(frozen=True)
class Protocol:
    """How a measurement is taken: samples, seconds for each candidate, launch, seed."""

    launch: str = "graph"
    rounds: int = 30
    seconds: float | None = 0.5
    seed: int = 0


DEFAULT_PROTOCOL = Protocol()


def launch_on(device: torch.device, protocol: Protocol) -> str:
    """How calls are launched: there are no graphs without CUDA."""
    return protocol.launch if device.type == "cuda" else "eager"


def relative_error(got: Tensor, truth: Tensor, base: Tensor | None = None) -> float:
    """The rms error over the rms of the truth, or of its distance from ``base``; infinite where the result is not finite or has
    another shape.
    """
    if got.shape != truth.shape:
        return float("inf")
    size = truth if base is None else truth - base
    error = float((got.double() - truth).square().mean().sqrt() / size.square().mean().sqrt())
    return error if error == error else float("inf")


def checked_rows(rows: int, count: int) -> list[int]:
    """Which rows are held against float64: all where there are few, else the first and the last ``count``, where tails go wrong."""
    return list(range(rows)) if rows <= 2 * count else [*range(count), *range(rows - count, rows)]


def measure(
    candidates: Mapping[str, Run],
    x: Tensor,
    truths: Tensor | Mapping[str, Tensor],
    *,
    baseline: str = "dense",
    worst: float = WORST_ERROR,
    base: Tensor | None = None,
    rows: Sequence[int] | None = None,
    refused: Mapping[str, str] | None = None,
    allowed: Mapping[str, float] | None = None,
    works: Mapping[str, Work] | Work | None = None,
    ceilings: Ceilings | None = None,
    protocol: Protocol = DEFAULT_PROTOCOL,
) -> dict[str, Measured]:
    """Hold each candidate against the truth, time the right ones in one shuffled run, and say what is wrong with the others.

    Args:
        truths: results in float64 for the checked rows, one for all or one for each candidate by its name.
        baseline: the candidate that ratios refer to. A twin of it, named with ``AGAIN``, is timed with the others.
        worst: how many times the baseline's error a candidate may have.
        base: what the results are a change of, for the checked rows; errors are relative to that change.
        rows: which rows (first dimension) the truths hold; all where it is None.
        refused: candidates that cannot run, and why; they get a row.
        allowed: rms errors that a candidate may have on its own account, such as that of quantization.
        works: what the computation must spend, one for all or one for each candidate.
    """
    protocol = replace(protocol, launch=launch_on(x.device, protocol))
    found: dict[str, Measured] = {name: Measured(protocol.launch, reason) for name, reason in (refused or {}).items()}
    errors, statuses = _check(candidates, x, truths, rows, base, baseline, worst, allowed or {})
    right = {name: run for name, run in candidates.items() if statuses[name] == "ok"}
    if baseline in right:
        right[baseline + AGAIN] = right[baseline]
        errors[baseline + AGAIN], statuses[baseline + AGAIN] = errors[baseline], "ok"
    timings = time_interleaved(right, x, rounds=protocol.rounds, seconds=protocol.seconds, launch=protocol.launch, seed=protocol.seed)
    noise = noise_of(timings, baseline)
    right_status = status_of(noise, x.device.type, baseline)
    for name in statuses:
        work = works.get(name.removesuffix(AGAIN)) if isinstance(works, Mapping) else works
        status = right_status if statuses[name] == "ok" else statuses[name]
        found[name] = judged(status, errors.get(name), timings.get(name), timings.get(baseline), noise, work, ceilings, protocol)
    return found


def _check(
    candidates: Mapping[str, Run],
    x: Tensor,
    truths: Tensor | Mapping[str, Tensor],
    rows: Sequence[int] | None,
    base: Tensor | None,
    baseline: str,
    worst: float,
    allowed: Mapping[str, float],
) -> tuple[dict[str, float], dict[str, str]]:
    """Each candidate's relative rms error, and "ok" or what is wrong with it."""
    errors: dict[str, float] = {}
    statuses: dict[str, str] = {}
    for name, run in candidates.items():
        try:
            got = run(x)
            truth = truths if isinstance(truths, Tensor) else truths[name]
            errors[name] = relative_error(got if rows is None else got[list(rows)], truth, base)
            del got
        except Exception as error:  # one candidate's failure, of whatever library, is its row and not the end of the others
            statuses[name] = f"failed: {one_line(error)}"
    for name, error in errors.items():
        most = max(allowed.get(name, 0.0), min(MOST_ERROR, worst * errors.get(baseline, float("inf"))))
        statuses[name] = "ok" if error <= most else f"wrong: relative error {error:.2g}"
    return errors, {name: statuses[name] for name in candidates}


def noise_of(timings: Mapping[str, Timing], baseline: str = "dense") -> float | None:
    """The share by which the times of the baseline and of its twin differ; None where they have none."""
    if baseline not in timings:
        return None
    return abs(timings[baseline + AGAIN].median_ms / timings[baseline].median_ms - 1)


def status_of(noise: float | None, device_type: str, baseline: str = "dense", measured: str = "timed") -> str:
    """What right rows of a run say whose twins, ``measured`` both, differ by ``noise``: "ok", or that they are noisy."""
    if noise is None or noise <= NOISE["cuda" if device_type == "cuda" else "cpu"]:
        return "ok"
    return f"noisy: {baseline} {measured} twice differs by {noise:.0%}"


def judged(
    status: str,
    error: float | None,
    timing: Timing | None,
    baseline: Timing | None,
    noise: float | None,
    work: Work | None,
    ceilings: Ceilings | None,
    protocol: Protocol,
) -> Measured:
    """What is known of a candidate: its time, if it has one, beside the baseline's and what the ceilings allow for its work."""
    bound = None if work is None or ceilings is None else ceilings.bound_ms(work)
    spent: dict[str, Any] = {} if work is None else {"bytes_moved": work.bytes_moved, "flops": work.flops, "bound_ms": bound}
    if timing is None:
        return Measured(protocol.launch, status, error, noise, **spent)
    if bound is not None:
        spent["share_of_bound"] = bound / timing.median_ms
    ratio = None if baseline is None else timing.median_ms / baseline.median_ms
    return Measured(timing.launch, status, error, noise, timing.median_ms, timing.iqr_ms, ratio, **spent)


def one_line(error: BaseException) -> str:
    """The first line of an error's message, short enough for a table."""
    text = (str(error).strip() or type(error).__name__).splitlines()[0]
    return text if len(text) <= 120 else f"{text[:117]}..."


def synchronize(device: torch.device) -> None:
    """Wait for the device where that means something."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
