"""Measures the energy of one factor and of whole models, from the counter that NVML keeps for the whole device."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import mean, quantiles
from typing import Any

import torch
from torch import Tensor

from flysurgery.bench.ceilings import Ceilings, Work, work_of_factor
from flysurgery.bench.factor import FIRST, LAST, factor_runs, problem_of_factor
from flysurgery.bench.measuring import AGAIN, check, checked_rows, status_of
from flysurgery.bench.stamp import nvml_handle
from flysurgery.bench.timing import Run, all_calls, in_mode, rotating, time_interleaved
from flysurgery.bench.units import converted_timm
from flysurgery.bench.variants import OPTIMIZED, VARIANTS, definitions, fused_modules
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


@dataclass(frozen=True)
class EnergyRow:
    """One candidate. ``what`` is a pattern "(a,b,c,d)" or a model's name; ``rewriting`` is d(b+c)/(bc), or None.

    ``bytes_moved`` and ``flops`` are what the computation must spend, ``bound_ms`` is the time that the ceilings of this run allow for it,
    and ``share_of_bound`` is the bound over ``call_ms``.
    """

    what: str
    rewriting: float | None
    rows: int
    mode: str
    layout: str
    candidate: str
    energy: Energy
    bytes_moved: int
    flops: int
    bound_ms: float
    share_of_bound: float | None


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
        return self._measure(work, len(inputs), windows=windows, seconds=seconds, idle_watts=idle_watts)

    def _measure(self, work: Callable[[], object], calls: int, *, windows: int, seconds: float, idle_watts: float) -> Energy:
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
        """Give the mean power between two steps of the counter at least ``seconds`` apart, and how far apart they were.

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
    """Takes the place of a meter where there is no counter: it measures how long calls take, and no joules."""

    def idle_watts(self) -> float:
        """Give zero, as nothing is known."""
        return 0.0

    def measure(self, run: Run, x: Tensor, *, windows: int = 3, seconds: float = WINDOW_SECONDS, idle_watts: float) -> Energy:
        """Measure the time of a call alone."""
        timing = time_interleaved({"call": run}, x, rounds=windows, seconds=seconds)["call"]
        return Energy("no joules: they need an NVIDIA GPU's counter", call_ms=timing.median_ms)


Meter = EnergyMeter | NoMeter


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
    """Mark a point in time on the device, behind all that was launched."""
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def energy_of_factor(
    meter: Meter, pattern: Pattern, rows: int, mode: str, device: torch.device, ceilings: Ceilings, **how: Any
) -> list[EnergyRow]:
    """Measure cuda, bmm, einsum and bsr, the last three in both memory layouts; bmm twice in each.

    ``how`` holds the keywords of the meter's ``measure``: ``windows``, ``seconds`` and ``idle_watts``.
    """
    found: list[EnergyRow] = []
    rewriting = pattern.d * (pattern.b + pattern.c) / (pattern.b * pattern.c)
    with in_mode(mode) as dtype, torch.no_grad():
        x = torch.randn(rows, pattern.in_features, device=device, dtype=dtype)
        factor = torch.randn(pattern.factor_shape, device=device, dtype=dtype)
        checked = range(min(64, rows))
        truth = ks_einsum(x[: len(checked)].double(), factor.double())
        problem = problem_of_factor(pattern, rows, x, allow_tf32=mode == "tf32")
        work = work_of_factor(pattern, rows, x.element_size())
        for layout in (FIRST, LAST):
            runs, refused = factor_runs(factor, layout, problem, names=("cuda", "bmm", "einsum", "bsr"))
            arranged = x if layout == FIRST else x.T.contiguous()
            energies = _metered(meter, runs, arranged, dict.fromkeys(runs, truth), checked, "bmm", how)
            energies |= {name: Energy(reason) for name, reason in refused.items()}
            found += [_row(str(pattern), rewriting, rows, mode, layout, name, each, work, ceilings) for name, each in energies.items()]
            torch.cuda.empty_cache()
    return found


def energy_of_model(
    meter: Meter,
    model: str,
    arguments: Mapping[str, Any],
    arch: str,
    batch: int,
    mode: str,
    device: torch.device,
    ceilings: Ceilings,
    *,
    candidates: Sequence[str] = ("dense", "layer", "bmm"),
    **how: Any,
) -> list[EnergyRow]:
    """Measure one forward of a timm ViT, converted beside dense, which is measured twice; joules are for the whole batch.

    ``candidates`` are names of ``VARIANTS``, followed by ``OPTIMIZED`` for what ``optimize`` makes of them. ``how`` is as in
    ``energy_of_factor``.
    """
    torch.manual_seed(0)
    with in_mode(mode) as dtype, torch.no_grad():
        module: Any = converted_timm(model, arguments, arch).to(device, dtype).requires_grad_(False)
        x = torch.randn(batch, 3, *module.patch_embed.img_size, device=device, dtype=dtype)
        dense = VARIANTS["dense"](module)
        runs = {}
        for name in candidates:
            variant = VARIANTS[name.removesuffix(OPTIMIZED)](module)
            runs[name] = fused_modules(variant, x) if name.endswith(OPTIMIZED) else variant
        checked = checked_rows(batch, 1)
        truths, works = definitions({name: dense if name.startswith("dense") else module for name in runs}, x, checked)
        energies = _metered(meter, runs, x, truths, checked, "dense", how)
    return [_row(model, None, batch, mode, FIRST, name, each, works[name.removesuffix(AGAIN)], ceilings) for name, each in energies.items()]


def _row(
    what: str, rewriting: float | None, rows: int, mode: str, layout: str, name: str, energy: Energy, work: Work, ceilings: Ceilings
) -> EnergyRow:
    bound = ceilings.bound_ms(work)
    share = bound / energy.call_ms if energy.call_ms else None
    return EnergyRow(what, rewriting, rows, mode, layout, name, energy, work.bytes_moved, work.flops, bound, share)


def _metered(
    meter: Meter,
    runs: Mapping[str, Run],
    x: Tensor,
    truths: Mapping[str, Tensor],
    rows: Sequence[int],
    baseline: str,
    how: Mapping[str, Any],
) -> dict[str, Energy]:
    """Hold each candidate against its truth, and meter the right ones in shuffled order, the baseline among them twice."""
    _, statuses = check(runs, x, truths, rows=rows, baseline=baseline)
    energies = {name: Energy(status) for name, status in statuses.items()}
    right = [name for name, status in statuses.items() if status == "ok"]
    twins = [baseline, baseline + AGAIN] if baseline in right else []
    right += twins[1:]
    for name in random.Random(0).sample(right, len(right)):
        energies[name] = meter.measure(runs[name.removesuffix(AGAIN)], x, **how)
    joules = [each for name in twins if (each := energies[name].joules)]
    if len(joules) == 2:
        noise = abs(joules[1] / joules[0] - 1)
        status = status_of(noise, x.device.type, baseline, "metered")
        energies |= {name: replace(energies[name], status=status, noise=noise) for name in right}
    return energies
