"""Joules of a call, from the counter that NVML keeps for the whole device."""

from __future__ import annotations

import importlib
import math
import time
from collections.abc import Callable

import torch
from torch import Tensor

from flysurgery.bench import Case, Record, in_mode
from flysurgery.bench.timing import Run, all_calls, rotating
from flysurgery.errors import OptionError

WINDOW_SECONDS = 1.0
"""The shortest window, unless ``--window`` says otherwise: the counter moves in steps of up to a tenth of a second."""

STUCK_SECONDS = 5.0
"""A counter that stands still for so long under load does not count."""

AHEAD_MS = 20.0
"""At least so much work is launched at a time, one such part ahead of the running one, so that the device never waits: reading the
counter takes some milliseconds."""


def with_joules(rows: list[Record], case: Case, mode: str, meter: EnergyMeter) -> list[Record]:
    """The rows of a case with the joules of each candidate that has a time; a baseline's twin is metered again."""
    found = []
    with in_mode(mode), torch.no_grad():
        for row in rows:
            plain = row["candidate"] if row["candidate"] in case.runs else case.baseline
            run = case.runs[plain]
            joules = None if isinstance(run, str) or not row["median_ms"] else meter.measure(run, case.input(plain))
            found.append(row | {"joules": joules})
    return found


class EnergyMeter:
    """Reads the energy counter of a CUDA device, by default in windows of at least ``seconds``.

    Raises:
        OptionError: there is no such counter, or nothing that reads it.
    """

    def __init__(self, device: torch.device, seconds: float = WINDOW_SECONDS) -> None:
        self.seconds = seconds
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

    def measure(self, run: Run, x: Tensor) -> float:
        """Measure the joules of ``run(x)``, those of the idle device included.

        Inputs are larger together than the L2 cache, and calls are replayed as a graph where they can be captured.
        """
        inputs = rotating(x)
        work, _ = all_calls(run, inputs, "graph", None)
        busy = Busy(work)
        watts = self.watts(busy.go_on, self.seconds)
        return watts * busy.work_ms() / len(inputs) / 1e3

    def watts(self, meanwhile: Callable[[], object], seconds: float) -> float:
        """The mean power between two steps of the counter at least ``seconds`` apart.

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
        return (after - before) / (end - begin)


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
