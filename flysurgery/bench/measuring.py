"""Checks, then times, candidates for one computation: a wrong result gets no time, and every row says how noisy its run was."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor, nn

from flysurgery.bench.ceilings import Work, measure_ceilings
from flysurgery.bench.rows import Record
from flysurgery.bench.timing import Run, Timing, in_mode, time_interleaved
from flysurgery.errors import first_line
from flysurgery.gpu.weight_cache import derived_bytes

WORST_ERROR = 16.0
"""A result is wrong, and gets no time, where its rms error exceeds that of the baseline by more than this factor."""

MOST_ERROR = 0.05
"""A result with a larger error than this computes something else, in any mode and whatever the baseline gives."""

NOISE = {"cuda": 0.03, "cpu": 0.10}
"""By how much the times of two identical candidates may differ. Where they differ by more, all rows of the run say noisy."""

AGAIN = " again"
"""Ends the name of the baseline's twin, which is the baseline timed a second time."""


@dataclass(frozen=True)
class Case:
    """One computation, ready to be checked and timed.

    Args:
        runs: the candidates by name. A text in the place of one says why it cannot run here.
        x: the input, one for all or one for each candidate.
        truths: results in float64 of the checked rows, one for all or one for each candidate.
        rows: which rows (first dimension) the truths hold; all where it is None.
        works: what the computation must spend, one for all or one for each candidate.
        baseline: the candidate that ratios refer to. It is timed twice.
        worst: how many times the baseline's error a candidate may have.
        allowed: rms errors that candidates may have on their own account, such as that of quantization.
        base: what the results are a change of, for the checked rows. Errors are then relative to that change.
        columns: what all rows say of the case.
        notes: further columns, by name, and their values by candidate.
    """

    runs: Mapping[str, Run | str]
    x: Tensor | Mapping[str, Tensor]
    truths: Tensor | Mapping[str, Tensor]
    rows: Sequence[int] | None = None
    works: Work | Mapping[str, Work] | None = None
    baseline: str = "dense"
    worst: float = WORST_ERROR
    allowed: Mapping[str, float] = field(default_factory=dict)
    base: Tensor | None = None
    columns: Mapping[str, Any] = field(default_factory=dict)
    notes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def input(self, name: str) -> Tensor:
        return _own(self.x, name)

    def work(self, name: str) -> Work | None:
        return self.works.get(name) if isinstance(self.works, Mapping) else self.works

    @property
    def device(self) -> torch.device:
        return (self.x if isinstance(self.x, Tensor) else next(iter(self.x.values()))).device


@dataclass(frozen=True)
class Measured:
    """What is known about one candidate. Times are None where ``status`` says why.

    ``status`` is "ok", "noisy: ...", "wrong: ..." or the reason why it did not run. ``launch`` is how it was launched.
    ``error`` is the rms error against float64, over the rms of the result. ``noise`` is by how much two identical baselines of
    this run differ. ``bytes_moved`` and ``flops`` are what the computation must spend, ``bound_ms`` is the time that the ceilings of
    this run allow for it, and ``share_of_bound`` is the bound over the measured time. ``peak_gib`` is what a call from Python needs at most
    beside the input and the weights, on CUDA: activations, gradients, the result and what lies between, in GiB. ``weights_gib`` are the
    parameters and buffers of a module and what kernels packed from them.
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
    peak_gib: float | None = None
    weights_gib: float | None = None


MEASURED = tuple(field.name for field in fields(Measured))


@dataclass(frozen=True)
class Protocol:
    """How a measurement is taken: samples, seconds for each candidate, launch, seed."""

    launch: str = "graph"
    rounds: int = 30
    seconds: float | None = 0.5
    seed: int = 0

    def on(self, device: torch.device) -> Protocol:
        """The same where calls are launched on a device: there are no graphs without CUDA."""
        return self if device.type == "cuda" else replace(self, launch="eager")


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


def rows_of_case(head: Mapping[str, Any], make: Callable[[], Case], mode: str, protocol: Protocol) -> list[Record]:
    """Make a case and measure it in one mode, without gradients, and give a row for each candidate: ``head``, its columns, its numbers."""
    torch.manual_seed(protocol.seed)
    with in_mode(mode), torch.no_grad():
        case = make()
        found = measure(case, protocol, mode)
    rows = []
    for name, measured in found.items():
        notes = {column: values.get(name) for column, values in case.notes.items()}
        rows.append({**head, **case.columns, "candidate": name, **asdict(measured), **notes})
    return rows


def measure(case: Case, protocol: Protocol, mode: str | None = None) -> dict[str, Measured]:
    """Hold each candidate against the truth, time the right ones in one shuffled run, and say what is wrong with the others.

    The baseline's twin stands behind it, named with ``AGAIN``. There are bounds where ``mode`` is named and the case has works.
    """
    protocol = protocol.on(case.device)
    ceilings = None if mode is None or case.works is None else measure_ceilings(mode, case.device)
    errors, statuses = check(case)
    right = {name: run for name, run in case.runs.items() if not isinstance(run, str) and statuses[name] == "ok"}
    inputs = {name: case.input(name) for name in right}
    peaks = {name: _peak_gib(run, inputs[name]) for name, run in right.items()}
    if case.baseline in right:
        right[case.baseline + AGAIN], inputs[case.baseline + AGAIN] = right[case.baseline], inputs[case.baseline]
    timings = time_interleaved(right, inputs, rounds=protocol.rounds, seconds=protocol.seconds, launch=protocol.launch, seed=protocol.seed)
    noise = noise_of(timings, case.baseline)
    right_status = status_of(noise, case.device.type, case.baseline)
    found: dict[str, Measured] = {}
    for plain, run in case.runs.items():
        work = None if isinstance(run, str) else case.work(plain)
        bound = None if work is None or ceilings is None else ceilings.bound_ms(work)
        spent: dict[str, Any] = {} if work is None else {"bytes_moved": work.bytes_moved, "flops": work.flops, "bound_ms": bound}
        for name in (plain, plain + AGAIN):
            if name in timings:
                timing = timings[name]
                ratio = timing.median_ms / timings[case.baseline].median_ms if case.baseline in timings else None
                share = None if bound is None else bound / timing.median_ms
                times = timing.median_ms, timing.iqr_ms, ratio
                own = {**spent, "share_of_bound": share, "peak_gib": peaks[plain], "weights_gib": weights_gib(run)}
                found[name] = Measured(timing.launch, right_status, errors[plain], noise, *times, **own)
            elif name == plain:
                found[name] = Measured(protocol.launch, statuses[name], errors.get(name), noise, **spent)
    return found


def check(case: Case) -> tuple[dict[str, float], dict[str, str]]:
    """Give the relative rms error of each candidate that runs, and of each "ok", or why it does not run, or what is wrong with it."""
    errors: dict[str, float] = {}
    statuses: dict[str, str] = {}
    for name, run in case.runs.items():
        statuses[name] = run if isinstance(run, str) else "ok"
        if not isinstance(run, str):
            try:
                got = run(case.input(name))
                errors[name] = relative_error(got if case.rows is None else got[list(case.rows)], _own(case.truths, name), case.base)
                del got
            except Exception as error:  # the failure of one candidate, of whatever library, is its row and does not end the others
                statuses[name] = f"failed: {first_line(error)}"
    for name, error in errors.items():
        most = max(case.allowed.get(name, 0.0), min(MOST_ERROR, case.worst * errors.get(case.baseline, float("inf"))))
        if not error <= most:
            statuses[name] = f"wrong: relative error {error:.2g}"
    return errors, statuses


def _peak_gib(run: Run, x: Tensor) -> float | None:
    """GiB that a call, not the first, takes at most beside what was there before it; None without CUDA, where nothing counts them."""
    if not x.is_cuda:
        return None
    torch.cuda.synchronize(x.device)
    torch.cuda.reset_peak_memory_stats(x.device)
    before = torch.cuda.memory_allocated(x.device)
    run(x)
    return (torch.cuda.max_memory_allocated(x.device) - before) / 2**30


def weights_gib(run: Run | str) -> float | None:
    """GiB of a module's parameters, its buffers, and what kernels packed from them and keep; None of what is no module."""
    if not isinstance(run, nn.Module):
        return None
    sizes = {each.data_ptr(): each.nbytes for each in (*run.parameters(), *run.buffers())}
    return (sum(sizes.values()) + derived_bytes(sizes)) / 2**30


def _own(each: Tensor | Mapping[str, Tensor], name: str) -> Tensor:
    return each if isinstance(each, Tensor) else each[name]


def noise_of(timings: Mapping[str, Timing], baseline: str) -> float | None:
    """Give the share by which the times of the baseline and of its twin differ; None where they have none."""
    if baseline not in timings:
        return None
    return abs(timings[baseline + AGAIN].median_ms / timings[baseline].median_ms - 1)


def status_of(noise: float | None, device_type: str, baseline: str) -> str:
    """Give the status of right rows of a run whose twins differ by ``noise``: "ok", or that they are noisy."""
    if noise is None or noise <= NOISE["cuda" if device_type == "cuda" else "cpu"]:
        return "ok"
    return f"noisy: {baseline} timed twice differs by {noise:.0%}"
