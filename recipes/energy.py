"""The energy of one factor, from the counter that NVML keeps for the whole device."""

from __future__ import annotations

import importlib
import math
import random
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from statistics import mean, quantiles

import torch
from factor_cases import FIRST, LAST, factor_runs, problem_of_factor
from torch import Tensor

from flysurgery.bench import Case, Record, in_mode, time_interleaved
from flysurgery.bench.ceilings import measure_ceilings, work_of_factor
from flysurgery.bench.measuring import AGAIN, check, status_of
from flysurgery.bench.timing import Run, all_calls, rotating
from flysurgery.errors import OptionError
from flysurgery.factors import ks_einsum
from flysurgery.patterns import Pattern

WINDOW_SECONDS = 1.0
"""The shortest window: the counter moves in steps of up to a tenth of a second."""

POLL_SECONDS = 1e-3
"""The time between two readings of the counter of an idle device."""

STUCK_SECONDS = 5.0
"""A counter that stands still for so long under load does not count."""

AHEAD_MS = 20.0
"""At least so much work is launched at a time, one such part ahead of the running one, so that the device never waits: reading the
counter takes some milliseconds."""


@dataclass(frozen=True)
class Energy:
    """Joules of one call, as the median and the interquartile range of all windows. They include the idle device's power.

    ``noise`` is by how much the joules of two identical candidates of this run differ. ``above_idle_joules`` leaves out what the idle
    device takes in the same time. ``watts`` is the mean power of the windows, ``window_s`` the length of the shortest of them.
    """

    status: str
    noise: float | None = None
    joules: float | None = None
    iqr_joules: float | None = None
    above_idle_joules: float | None = None
    watts: float | None = None
    idle_watts: float | None = None
    call_ms: float | None = None
    windows: int = 0
    window_s: float | None = None


Measure = Callable[[Run, Tensor], Energy]
HEAD = ("what", "rewriting", "rows", "mode", "layout")
ENERGY_COLUMNS = (*HEAD, "candidate", *(field.name for field in fields(Energy)), "bytes_moved", "flops", "bound_ms", "share_of_bound")
"""``what`` is a pattern "(a,b,c,d)"; ``rewriting`` is d(b+c)/(bc). ``bound_ms`` is the time that the ceilings
of this run allow for what the computation must spend, and ``share_of_bound`` is the bound over ``call_ms``."""


class EnergyMeter:
    """Reads the energy counter of a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        if device.type != "cuda":
            raise OptionError(f"energy is read from an NVIDIA GPU's counter, and the device is {device}; there is none for a CPU here")
        self._device = device
        try:
            self._nvml = importlib.import_module("pynvml")
            self._nvml.nvmlInit()
            uuid = str(torch.cuda.get_device_properties(device).uuid)
            self._handle = self._nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}".encode())
            self.joules()
        except ImportError as error:
            raise OptionError("energy is read through NVML, which needs nvidia-ml-py: pip install 'flysurgery[bench]'") from error
        except Exception as error:  # NVML makes its error classes at run time
            raise OptionError(f"this device has no energy counter that NVML may read: {error}") from error

    def joules(self) -> float:
        """Read the counter."""
        return self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle) / 1e3

    def idle_watts(self, seconds: float = WINDOW_SECONDS) -> float:
        """Measure the mean power while nothing runs, with the clocks still up from what ran before."""
        torch.cuda.synchronize(self._device)
        return self._watts(lambda: time.sleep(POLL_SECONDS), seconds)[0]

    def measure(self, run: Run, x: Tensor, *, windows: int = 3, seconds: float = WINDOW_SECONDS, idle_watts: float) -> Energy:
        """Measure ``run(x)`` over inputs larger together than the L2 cache, replayed as a graph where it can be captured."""
        inputs = rotating(x)
        work, _ = all_calls(run, inputs, "graph", None)
        powers, lengths, call_ms = [], [], []
        for _ in range(max(2, windows)):
            busy = Busy(work)
            watts, length = self._watts(busy.go_on, seconds)
            powers.append(watts)
            lengths.append(length)
            call_ms.append(busy.work_ms() / len(inputs))
        spent = [watts * ms / 1e3 for watts, ms in zip(powers, call_ms, strict=True)]
        lower, middle, upper = quantiles(spent, n=4, method="inclusive")
        watts = mean(powers)
        above = middle * (1 - idle_watts / watts)
        return Energy("ok", None, middle, upper - lower, above, watts, idle_watts, mean(call_ms), len(spent), min(lengths))

    def _watts(self, meanwhile: Callable[[], object], seconds: float) -> tuple[float, float]:
        """The mean power between two steps of the counter at least ``seconds`` apart, and how far apart they were.

        ``meanwhile`` runs over and over. The first step is not counted: it holds energy of the time before.
        """
        steps: list[tuple[float, float]] = []
        last, moved = self.joules(), time.perf_counter()
        while len(steps) < 3 or steps[-1][0] - steps[1][0] < seconds:
            meanwhile()
            now, joules = time.perf_counter(), self.joules()
            if joules != last:
                steps.append((now, joules))
                last, moved = joules, now
            elif now - moved > STUCK_SECONDS:
                raise OptionError(f"this device's energy counter stood still for {STUCK_SECONDS:.0f} s; nothing can be read from it")
        (begin, before), (end, after) = steps[1], steps[-1]
        return (after - before) / (end - begin), end - begin


def without_joules(run: Run, x: Tensor, *, windows: int, seconds: float) -> Energy:
    """The time of a call alone, where there is no counter."""
    timing = time_interleaved({"call": run}, x, rounds=windows, seconds=seconds)["call"]
    return Energy("no joules: they need an NVIDIA GPU's counter", call_ms=timing.median_ms)


def meter_or_none(device: torch.device) -> EnergyMeter | None:
    """The meter of a device; where there is none, say why."""
    try:
        return EnergyMeter(device)
    except OptionError as error:
        print(f"no joules: {error}")
        return None


class Busy:
    """Launches ``work`` again and again, always a part ahead of the running one, so that the device never waits."""

    def __init__(self, work: Callable[[], object]) -> None:
        self._work = work
        work()
        before = _mark()
        work()
        after = _mark()
        after.synchronize()
        self._at_once = max(1, math.ceil(AHEAD_MS / before.elapsed_time(after)))
        self._start, self._launched = _mark(), 0
        self._marks = self._start, self._start
        self.go_on()

    def go_on(self) -> None:
        """Launch the next part if the last but one is done."""
        if self._marks[0].query():
            for _ in range(self._at_once):
                self._work()
            self._launched += self._at_once
            self._marks = self._marks[1], _mark()

    def work_ms(self) -> float:
        """Wait until all work is done, and give its milliseconds over the number of launches."""
        end = _mark()
        end.synchronize()
        return self._start.elapsed_time(end) / self._launched


def _mark() -> torch.cuda.Event:
    """A point in time on the device, behind all that was launched."""
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def energy_of_factor(measure: Measure, pattern: Pattern, rows: int, mode: str, device: torch.device) -> list[Record]:
    """Measure cuda, bmm, einsum and bsr, the last three in both memory layouts; bmm twice in each."""
    found: list[Record] = []
    ceilings, rewriting = measure_ceilings(mode, device), pattern.d * (pattern.b + pattern.c) / (pattern.b * pattern.c)
    with in_mode(mode) as dtype, torch.no_grad():
        x = torch.randn(rows, pattern.in_features, device=device, dtype=dtype)
        factor = torch.randn(pattern.factor_shape, device=device, dtype=dtype)
        checked = range(min(64, rows))
        truth = ks_einsum(x[: len(checked)].double(), factor.double())
        problem = problem_of_factor(pattern, x, allow_tf32=mode == "tf32")
        work = work_of_factor(pattern, rows, x.element_size())
        for layout in (FIRST, LAST):
            runs = factor_runs(factor, layout, problem, names=("cuda", "bmm", "einsum", "bsr"))
            case = Case(runs, x if layout == FIRST else x.T.contiguous(), truth, checked, work, "bmm")
            head: Record = dict(zip(HEAD, (str(pattern), rewriting, rows, mode, layout), strict=True))
            head |= {"bytes_moved": work.bytes_moved, "flops": work.flops, "bound_ms": ceilings.bound_ms(work)}
            for name, each in _metered(measure, case).items():
                share = head["bound_ms"] / each.call_ms if each.call_ms else None
                found.append({**head, "candidate": name, **asdict(each), "share_of_bound": share})
            torch.cuda.empty_cache()
    return found


def _metered(measure: Measure, case: Case) -> dict[str, Energy]:
    """Hold each candidate against its truth, and meter the right ones in shuffled order, the baseline among them twice."""
    _, statuses = check(case)
    energies = {name: Energy(status) for name, status in statuses.items()}
    right = {name: run for name, run in case.runs.items() if statuses[name] == "ok" and not isinstance(run, str)}
    twins = [case.baseline, case.baseline + AGAIN] if case.baseline in right else []
    order = [*right, *twins[1:]]
    for name in random.Random(0).sample(order, len(order)):
        plain = name.removesuffix(AGAIN)
        energies[name] = measure(right[plain], case.input(plain))
    joules = [each for name in twins if (each := energies[name].joules)]
    if len(joules) == 2:
        noise = abs(joules[1] / joules[0] - 1)
        status = status_of(noise, case.device.type, case.baseline, "metered")
        energies |= {name: replace(energies[name], status=status, noise=noise) for name in order}
    return energies
