"""Energy of one call, from the counter that NVML keeps for the whole device."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from statistics import quantiles
from typing import Any

import torch
from torch import Tensor

from flysurgery.bench.clocks import nvml_handle
from flysurgery.bench.samplers import Run, captured, rotating
from flysurgery.errors import OptionError

WINDOW_SECONDS = 1.0
"""Shortest window: the counter moves in steps of some ten milliseconds."""

MARGIN = 1.1
"""How much longer windows are planned, as calls may turn out faster than those that they are planned by."""


@dataclass(frozen=True)
class Energy:
    """Joules of one call, median and quartiles' distance of all windows; the idle device's power is part of them.

    ``above_idle_joules`` leaves out what the idle device takes in the same time. ``watts`` is the mean power of the windows,
    ``window_s`` how long the shortest of them was.
    """

    status: str
    joules: float | None = None
    iqr_joules: float | None = None
    above_idle_joules: float | None = None
    watts: float | None = None
    idle_watts: float | None = None
    call_ms: float | None = None
    windows: int = 0
    window_s: float | None = None


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
        torch.cuda.synchronize(self._device)
        return self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle) / 1e3

    def idle_watts(self, seconds: float = WINDOW_SECONDS) -> float:
        """Mean power while nothing runs, clocks still up from what ran before."""
        begin, start = self.joules(), time.perf_counter()
        time.sleep(seconds)
        return (self.joules() - begin) / (time.perf_counter() - start)

    def measure(self, run: Run, x: Tensor, *, windows: int = 3, seconds: float = WINDOW_SECONDS, idle_watts: float) -> Energy:
        """Energy of ``run(x)`` over inputs larger together than the L2 cache, replayed as a graph where it can be captured."""
        work, calls = _work(run, rotating(x))
        call_ms = self._time(work) / calls
        repeats = math.ceil(MARGIN * seconds * 1e3 / (call_ms * calls))
        spent, powers, lengths = [], [], []
        for _ in range(max(2, windows)):
            begin, start = self.joules(), time.perf_counter()
            for _ in range(repeats):
                work()
            used, length = self.joules() - begin, time.perf_counter() - start
            spent.append(used / (repeats * calls))
            powers.append(used / length)
            lengths.append(length)
        lower, middle, upper = quantiles(spent, n=4, method="inclusive")
        watts = sum(powers) / len(powers)
        above = middle * (1 - idle_watts / watts)
        return Energy("ok", middle, upper - lower, above, watts, idle_watts, call_ms, len(spent), min(lengths))

    def _time(self, work: Any) -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        work()
        start.record()
        for _ in range(5):
            work()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 5


def _work(run: Run, inputs: list[Tensor]) -> tuple[Any, int]:
    """A function that runs once over all inputs: a graph's replay where there can be one."""

    def eager() -> None:
        for x in inputs:
            run(x)

    try:
        return captured(run, inputs, torch.cuda.graph_pool_handle()).replay, len(inputs)
    except RuntimeError:  # an operation that waits for the device
        torch.cuda.synchronize()
        return eager, len(inputs)
