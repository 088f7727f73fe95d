"""Energy of one call, from the counter that NVML keeps for the whole device."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import mean, quantiles
from typing import Protocol

import torch
from torch import Tensor

from flysurgery.bench.clocks import nvml_handle
from flysurgery.bench.samplers import Run, captured, rotating
from flysurgery.bench.timing import time_interleaved
from flysurgery.errors import OptionError

WINDOW_SECONDS = 1.0
"""Shortest window: the counter moves in steps of up to a tenth of a second."""

POLL_SECONDS = 1e-3
"""How often the counter of an idle device is read."""

STUCK_SECONDS = 5.0
"""A counter that stands still for so long under load does not count."""

AHEAD_MS = 20.0
"""So much work at least is launched at a time, one such part ahead of the one that runs, so that the device never waits: reading the
counter takes some milliseconds."""


@dataclass(frozen=True)
class Energy:
    """Joules of one call, median and quartiles' distance of all windows; the idle device's power is part of them.

    ``noise`` is by how much the joules of two identical candidates of this run differ. ``above_idle_joules`` leaves out what the idle
    device takes in the same time. ``watts`` is the mean power of the windows, ``window_s`` how long the shortest of them was.
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


class Meter(Protocol):
    """What tells of a call what it takes: joules and time, or time alone."""

    def idle_watts(self, seconds: float = WINDOW_SECONDS) -> float:
        """Mean power while nothing runs."""
        ...

    def measure(self, run: Run, x: Tensor, *, windows: int = 3, seconds: float = WINDOW_SECONDS, idle_watts: float) -> Energy:
        """What ``run(x)`` takes."""
        ...


class EnergyMeter:
    """Reads the energy counter of a CUDA device.

    Raises:
        OptionError: no CUDA device, no ``nvidia-ml-py``, or a device without the counter; one sentence says which.
    """

    def __init__(self, device: torch.device) -> None:
        if device.type != "cuda":
            raise OptionError(f"energy is read from an NVIDIA GPU's counter, and the device is {device}; there is none for a CPU here")
        found = nvml_handle(device)
        if found is None:
            raise OptionError("energy is read through NVML, which needs nvidia-ml-py and a driver: pip install 'flysurgery[bench]'")
        self._device = device
        self._nvml, self._handle = found
        try:
            self.joules()
        except Exception as error:  # NVML's errors are classes that it makes at run time
            raise OptionError(f"this device has no energy counter that NVML may read: {error}") from error

    def joules(self) -> float:
        """The counter now."""
        return self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle) / 1e3

    def idle_watts(self, seconds: float = WINDOW_SECONDS) -> float:
        """Mean power while nothing runs, clocks still up from what ran before."""
        torch.cuda.synchronize(self._device)
        return self._watts(lambda: time.sleep(POLL_SECONDS), seconds)[0]

    def measure(self, run: Run, x: Tensor, *, windows: int = 3, seconds: float = WINDOW_SECONDS, idle_watts: float) -> Energy:
        """Energy of ``run(x)`` over inputs larger together than the L2 cache, replayed as a graph where it can be captured."""
        work, calls = _work(run, rotating(x))
        powers, lengths, call_ms = [], [], []
        for _ in range(max(2, windows)):
            busy = Busy(work)
            watts, length = self._watts(busy.go_on, seconds)
            powers.append(watts)
            lengths.append(length)
            call_ms.append(busy.work_ms() / calls)
        spent = [watts * ms / 1e3 for watts, ms in zip(powers, call_ms, strict=True)]
        lower, middle, upper = quantiles(spent, n=4, method="inclusive")
        watts = mean(powers)
        above = middle * (1 - idle_watts / watts)
        return Energy("ok", None, middle, upper - lower, above, watts, idle_watts, mean(call_ms), len(spent), min(lengths))

    def _watts(self, meanwhile: Callable[[], object], seconds: float) -> tuple[float, float]:
        """Mean power between two steps of the counter at least ``seconds`` apart, and how far apart they were.

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


class NoMeter:
    """In the place of a meter where there is no counter: it tells how long calls take, and no joules."""

    def idle_watts(self, seconds: float = WINDOW_SECONDS) -> float:
        """Nothing is known of it."""
        return 0.0

    def measure(self, run: Run, x: Tensor, *, windows: int = 3, seconds: float = WINDOW_SECONDS, idle_watts: float) -> Energy:
        """The time of a call alone."""
        timing = time_interleaved({"call": run}, x, rounds=windows, seconds=seconds)["call"]
        return Energy("no joules: they need an NVIDIA GPU's counter", call_ms=timing.median_ms)


class Busy:
    """Launches ``work`` again and again, always a part ahead of the one that runs, so that the device never waits."""

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
        """Milliseconds of one ``work``, all that were launched over their number; waits until they are done."""
        end = _mark()
        end.synchronize()
        return self._start.elapsed_time(end) / self._launched


def _mark() -> torch.cuda.Event:
    """A point in time on the device, behind all that was launched."""
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _work(run: Run, inputs: list[Tensor]) -> tuple[Callable[[], object], int]:
    """A function that runs once over all inputs: a graph's replay where there can be one."""

    def eager() -> None:
        for x in inputs:
            run(x)

    try:
        return captured(run, inputs, torch.cuda.graph_pool_handle()).replay, len(inputs)
    except RuntimeError:  # an operation that waits for the device
        torch.cuda.synchronize()
        return eager, len(inputs)
