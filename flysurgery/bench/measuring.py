"""Checks, then times, candidates for one computation: a wrong result gets no time, and every row says how noisy its run was."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor, nn

from flysurgery.bench.ceilings import Work, measure_ceilings
from flysurgery.bench.rows import Record
from flysurgery.bench.timing import Run, in_mode, time_interleaved
from flysurgery.errors import first_line
from flysurgery.gpu.weight_cache import derived_bytes

WORST_ERROR = 16.0  # a result is wrong, and gets no time, where its rms error is more times the baseline's
MOST_ERROR = 0.05  # a result with a larger one computes something else, in any mode and whatever the baseline gives

NOISE = {"cuda": 0.03, "cpu": 0.10}
"""By how much the times of two identical candidates may differ. Where they differ by more, all rows of the run say noisy."""

AGAIN = " again"  # ends the name of the baseline's twin, which is the baseline timed a second time


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
    notes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def input(self, name: str) -> Tensor:
        return self.x if isinstance(self.x, Tensor) else self.x[name]

    def work(self, name: str) -> Work | None:
        return self.works.get(name) if isinstance(self.works, Mapping) else self.works

    @property
    def device(self) -> torch.device:
        return self.input(next(iter(self.runs))).device


@dataclass(frozen=True)
class Measured:
    """What is known about one candidate. Times are None where ``status`` says why."""

    launch: str  # how it was launched
    status: str  # "ok", "noisy: ...", "wrong: ..." or the reason why it did not run
    error: float | None = None  # the rms error against float64, over the rms of the result
    noise: float | None = None  # by how much two identical baselines of this run differ
    median_ms: float | None = None
    iqr_ms: float | None = None
    ratio_to_dense: float | None = None
    bytes_moved: int | None = None  # what the computation must spend, as the next
    flops: int | None = None
    bound_ms: float | None = None  # the time that the ceilings of this run allow for it
    share_of_bound: float | None = None  # the bound over the measured time
    peak_gib: float | None = None  # on CUDA: what a call needs at most beside the input and the weights
    weights_gib: float | None = None  # of a module: parameters, buffers and what kernels packed from them


MEASURED = tuple(field.name for field in fields(Measured))


@dataclass(frozen=True)
class Protocol:
    """How a measurement is taken: samples, seconds for each candidate, launch, seed."""

    launch: str = "graph"
    rounds: int = 30
    seconds: float | None = 0.5
    seed: int = 0

    def on(self, device: torch.device) -> "Protocol":
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
        rows.append({**head, "candidate": name, **asdict(measured), **notes})
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
    twin = case.baseline + AGAIN
    if case.baseline in right:
        right[twin], inputs[twin] = right[case.baseline], inputs[case.baseline]
    timings = time_interleaved(right, inputs, rounds=protocol.rounds, seconds=protocol.seconds, launch=protocol.launch, seed=protocol.seed)
    dense_ms, noise, status = None, None, "ok"
    if case.baseline in timings:
        dense_ms = timings[case.baseline].median_ms
        noise = abs(timings[twin].median_ms / dense_ms - 1)
        if noise > NOISE["cuda" if case.device.type == "cuda" else "cpu"]:
            status = f"noisy: {case.baseline} timed twice differs by {noise:.0%}"
    found: dict[str, Measured] = {}
    for plain, run in case.runs.items():
        measured = Measured(protocol.launch, statuses[plain], errors.get(plain), noise)
        work = None if isinstance(run, str) else case.work(plain)
        bound = None if work is None or ceilings is None else ceilings.bound_ms(work)
        if work is not None:
            measured = replace(measured, bytes_moved=work.bytes_moved, flops=work.flops, bound_ms=bound)
        if plain not in timings:
            found[plain] = measured
        for name in (plain, plain + AGAIN):
            if name in timings:
                timing = timings[name]
                found[name] = replace(
                    measured,
                    launch=timing.launch,
                    status=status,
                    median_ms=timing.median_ms,
                    iqr_ms=timing.iqr_ms,
                    ratio_to_dense=None if dense_ms is None else timing.median_ms / dense_ms,
                    share_of_bound=None if bound is None else bound / timing.median_ms,
                    peak_gib=peaks[plain],
                    weights_gib=weights_gib(run),
                )
    return found


def check(case: Case) -> tuple[dict[str, float], dict[str, str]]:
    """Give the relative rms error of each candidate that runs, and of each "ok", or why it does not run, or what is wrong with it."""
    errors: dict[str, float] = {}
    statuses: dict[str, str] = {}
    for name, run in case.runs.items():
        statuses[name] = run if isinstance(run, str) else "ok"
        if not isinstance(run, str):
            truth = case.truths if isinstance(case.truths, Tensor) else case.truths[name]
            try:
                got = run(case.input(name))
                errors[name] = relative_error(got if case.rows is None else got[list(case.rows)], truth, case.base)
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


def weights_gib(run: object) -> float | None:
    """GiB of a module's parameters, its buffers, and what kernels packed from them and keep; None of what is no module."""
    if not isinstance(run, nn.Module):
        return None
    sizes = {each.data_ptr(): each.nbytes for each in (*run.parameters(), *run.buffers())}
    return (sum(sizes.values()) + derived_bytes(sizes)) / 2**30
