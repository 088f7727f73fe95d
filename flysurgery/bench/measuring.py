"""Checks, then times, candidates for one computation: a wrong result gets no time, and every row says how noisy its run was."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from flysurgery.bench.ceilings import Ceilings, Work
from flysurgery.bench.timing import Run, Timing, time_interleaved

Row = TypeVar("Row")

WORST_ERROR = 16.0
"""A result is wrong, and gets no time, where its rms error exceeds that of the baseline by more than this factor."""

MOST_ERROR = 0.05
"""A result with a larger error than this computes something else, in any mode and whatever the baseline gives."""

NOISE = {"cuda": 0.03, "cpu": 0.10}
"""By how much the times of two identical candidates may differ. Where they differ by more, all rows of the run say noisy."""

AGAIN = " again"
"""Ends the name of the baseline's twin, which is the baseline timed a second time."""


@dataclass(frozen=True)
class Measured:
    """What is known about one candidate. Times are None where ``status`` says why.

    ``status`` is "ok", "noisy: ...", "wrong: ..." or the reason why it did not run. ``launch`` is how it was launched.
    ``error`` is the rms error against float64, over the rms of the result. ``noise`` is by how much two identical baselines of
    this run differ. ``bytes_moved`` and ``flops`` are what the computation must spend, ``bound_ms`` is the time that the ceilings of
    this run allow for it, and ``share_of_bound`` is the bound over the measured time.
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
    """Say how calls are launched: there are no graphs without CUDA."""
    return protocol.launch if device.type == "cuda" else "eager"


def relative_error(got: Tensor, truth: Tensor, base: Tensor | None = None) -> float:
    """Give the rms error over the rms of the truth, or of its distance from ``base``.

    It is infinite where the result is not finite or has another shape.
    """
    if got.shape != truth.shape:
        return float("inf")
    size = truth if base is None else truth - base
    error = float((got.double() - truth).square().mean().sqrt() / size.square().mean().sqrt())
    return error if error == error else float("inf")


def checked_rows(rows: int, count: int) -> list[int]:
    """Choose the rows to hold against float64: all where there are few, else the first and the last ``count``, where tails go wrong."""
    return list(range(rows)) if rows <= 2 * count else [*range(count), *range(rows - count, rows)]


def measure(
    candidates: Mapping[str, Run],
    x: Tensor | Mapping[str, Tensor],
    truths: Tensor | Mapping[str, Tensor] | None,
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
        x: the input, one for all or one for each candidate by its name.
        truths: results in float64 for the checked rows, one for all or one for each candidate; None if all are known to be right.
        baseline: the candidate that ratios refer to. Its twin, named with ``AGAIN``, is timed with the others.
        worst: how many times the baseline's error a candidate may have.
        base: what the results are a change of, for the checked rows. Errors are then relative to that change.
        rows: which rows (first dimension) the truths hold; all where it is None.
        refused: candidates that cannot run, and why; they get a row.
        allowed: rms errors that a candidate may have on its own account, such as that of quantization.
        works: what the computation must spend, one for all or one for each candidate.
    """
    device = (x if isinstance(x, Tensor) else next(iter(x.values()))).device
    protocol = replace(protocol, launch=launch_on(device, protocol))
    errors: dict[str, float] = {}
    statuses = dict.fromkeys(candidates, "ok")
    if truths is not None:
        errors, statuses = check(candidates, x, truths, rows=rows, baseline=baseline, base=base, worst=worst, allowed=allowed)
    right = {name: run for name, run in candidates.items() if statuses[name] == "ok"}
    if baseline in right:
        right[baseline + AGAIN] = right[baseline]
    inputs = {name: _own(x, name.removesuffix(AGAIN)) for name in right}
    timings = time_interleaved(right, inputs, rounds=protocol.rounds, seconds=protocol.seconds, launch=protocol.launch, seed=protocol.seed)
    noise = noise_of(timings, baseline)
    right_status = status_of(noise, device.type, baseline)
    found = {name: Measured(protocol.launch, reason) for name, reason in (refused or {}).items()}
    for name in dict.fromkeys((*candidates, *right)):
        plain = name.removesuffix(AGAIN)
        work = works.get(plain) if isinstance(works, Mapping) else works
        bound = None if work is None or ceilings is None else ceilings.bound_ms(work)
        spent: dict[str, Any] = {} if work is None else {"bytes_moved": work.bytes_moved, "flops": work.flops, "bound_ms": bound}
        if name not in timings:
            found[name] = Measured(protocol.launch, statuses[name], errors.get(plain), noise, **spent)
            continue
        timing = timings[name]
        ratio = timing.median_ms / timings[baseline].median_ms if baseline in timings else None
        share = None if bound is None else bound / timing.median_ms
        times = timing.median_ms, timing.iqr_ms, ratio
        found[name] = Measured(timing.launch, right_status, errors.get(plain), noise, *times, **spent, share_of_bound=share)
    return found


def check(
    candidates: Mapping[str, Run],
    x: Tensor | Mapping[str, Tensor],
    truths: Tensor | Mapping[str, Tensor],
    *,
    rows: Sequence[int] | None,
    baseline: str,
    base: Tensor | None = None,
    worst: float = WORST_ERROR,
    allowed: Mapping[str, float] | None = None,
) -> tuple[dict[str, float], dict[str, str]]:
    """Give each candidate's relative rms error, and "ok" or what is wrong with it; the arguments are those of ``measure``."""
    errors: dict[str, float] = {}
    statuses = dict.fromkeys(candidates, "ok")
    for name, run in candidates.items():
        try:
            got = run(_own(x, name))
            errors[name] = relative_error(got if rows is None else got[list(rows)], _own(truths, name), base)
            del got
        except Exception as error:  # the failure of one candidate, of whatever library, is its row and does not end the others
            statuses[name] = f"failed: {one_line(error)}"
    for name, error in errors.items():
        most = max((allowed or {}).get(name, 0.0), min(MOST_ERROR, worst * errors.get(baseline, float("inf"))))
        if not error <= most:
            statuses[name] = f"wrong: relative error {error:.2g}"
    return errors, statuses


def _own(each: Tensor | Mapping[str, Tensor], name: str) -> Tensor:
    return each if isinstance(each, Tensor) else each[name]


def rows_of(
    kind: Callable[..., Row], head: Mapping[str, Any], found: Mapping[str, Measured], order: Iterable[str], **columns: Mapping[str, Any]
) -> list[Row]:
    """Make a row of the class ``kind`` for each measured candidate in ``order``, and for its twin.

    ``head`` holds the columns that all rows share, ``columns`` further ones by candidate, None where a candidate is missing.
    """
    names = [name for each in order for name in (each, each + AGAIN) if name in found]
    own = {name: {column: values.get(name) for column, values in columns.items()} for name in names}
    return [kind(**head, **own[name], candidate=name, measured=found[name]) for name in names]


def noise_of(timings: Mapping[str, Timing], baseline: str = "dense") -> float | None:
    """Give the share by which the times of the baseline and of its twin differ; None where they have none."""
    if baseline not in timings:
        return None
    return abs(timings[baseline + AGAIN].median_ms / timings[baseline].median_ms - 1)


def status_of(noise: float | None, device_type: str, baseline: str = "dense", measured: str = "timed") -> str:
    """Give the status of right rows of a run whose twins, ``measured`` both, differ by ``noise``: "ok", or that they are noisy."""
    if noise is None or noise <= NOISE["cuda" if device_type == "cuda" else "cpu"]:
        return "ok"
    return f"noisy: {baseline} {measured} twice differs by {noise:.0%}"


def one_line(error: BaseException) -> str:
    """Give the first line of an error's message, short enough for a table."""
    text = (str(error).strip() or type(error).__name__).splitlines()[0]
    return text if len(text) <= 120 else f"{text[:117]}..."


def synchronize(device: torch.device) -> None:
    """Wait for the device where that means something."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
