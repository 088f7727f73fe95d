"""Rows of energy: their bounds, no joules for what is refused or wrong, and power read from a counter that moves in steps."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import Tensor

from flysurgery.bench.ceilings import Ceilings
from flysurgery.bench.energy import Busy, Energy, EnergyMeter, EnergyRow, energy_of_factor, energy_of_model
from flysurgery.bench.measuring import status_of
from flysurgery.errors import OptionError
from flysurgery.patterns import Pattern

HOW: dict[str, Any] = {"idle_watts": 1.0, "seconds": 0.0, "windows": 2}
CPU = torch.device("cpu")


class Counter:
    """Every call takes 4 ms, the first measurement 2 joules, and each later one ``drift`` times those of the one before."""

    def __init__(self, drift: float = 1.0) -> None:
        self.drift, self.measurements = drift, 0

    def measure(self, run: Any, x: Tensor, **how: Any) -> Energy:
        self.measurements += 1
        return Energy("ok", None, 2.0 * self.drift ** (self.measurements - 1), call_ms=4.0)


def rows_of_factor(counter: Any = None) -> dict[tuple[str, str], EnergyRow]:
    found = energy_of_factor(counter or Counter(), Pattern(2, 3, 4, 5), 100, "fp32", CPU, Ceilings(1000.0, 1e9), **HOW)
    return {(row.candidate, row.layout): row for row in found}


def test_a_factors_rows_have_bounds_and_say_why_they_lack_joules() -> None:
    rows = rows_of_factor()
    bmm, absent = rows["bmm", "first"], rows["cuda", "last"]
    assert bmm.energy.joules == 2.0
    assert bmm.bytes_moved == 4 * (100 * (40 + 30) + 120)  # x, y and the entries of the factor
    assert bmm.flops == 2 * 100 * 120
    assert bmm.bound_ms == pytest.approx(bmm.bytes_moved / 1000)
    assert bmm.share_of_bound == pytest.approx(bmm.bound_ms / 4.0)
    assert absent.energy.status.startswith("no: our kernels") and absent.energy.joules is None and absent.energy.noise is None
    assert absent.bound_ms == bmm.bound_ms and absent.share_of_bound is None


def test_a_wrong_result_has_no_joules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flysurgery.bench.energy.ks_einsum", lambda x, factor: 2 * x.new_ones(len(x), 30))
    row = rows_of_factor()["bmm", "first"]
    assert row.energy.status.startswith("wrong") and row.energy.joules is None and row.share_of_bound is None


def test_a_converted_model_must_spend_less_than_dense() -> None:
    names = ("dense", "layer")
    found = energy_of_model(Counter(), "test_vit", {}, "monarch", 1, "fp32", CPU, Ceilings(1e6, 1e6), candidates=names, **HOW)
    dense, layer, again = found
    assert (dense.candidate, layer.candidate, again.candidate) == (*names, "dense again")
    assert again.energy.noise == 0 and again.flops == dense.flops
    assert 0 < layer.flops < dense.flops and 0 < layer.bytes_moved < dense.bytes_moved
    assert layer.share_of_bound == pytest.approx(layer.bound_ms / 4.0)


def test_twins_are_metered_among_the_others_and_make_a_run_noisy() -> None:
    counter = Counter(drift=1.04)
    rows = rows_of_factor(counter)
    for layout in ("first", "last"):
        of = {name: row.energy for (name, where), row in rows.items() if where == layout and row.energy.joules}
        assert of.keys() == {"bmm", "bmm again", "einsum", "bsr"}
        noise = abs(of["bmm again"].joules / of["bmm"].joules - 1)  # pyright: ignore
        assert {(each.noise, each.status) for each in of.values()} == {(noise, status_of(noise, "cpu", "bmm", "metered"))}
    assert counter.measurements == 8


class Stepping(EnergyMeter):
    """A device at 100 watts, whose counter is updated every 20 ms."""

    def __init__(self) -> None:
        pass

    def joules(self) -> float:
        return 100 * (time.perf_counter() // 0.02 * 0.02)


def test_power_is_that_between_steps_of_the_counter(monkeypatch: pytest.MonkeyPatch) -> None:
    class Waiting:
        """Each call of the work takes 10 ms."""

        def __init__(self, work: Any) -> None:
            self.go_on = work

        def work_ms(self) -> float:
            return 10.0

    monkeypatch.setattr("flysurgery.bench.energy.Busy", Waiting)
    monkeypatch.setattr("flysurgery.bench.energy.all_calls", lambda *_: (lambda: time.sleep(1e-4), "eager"))
    monkeypatch.setattr("flysurgery.bench.energy.rotating", lambda x: [x, x])
    energy = Stepping().measure(lambda x: x, torch.zeros(1), windows=3, seconds=0.1, idle_watts=20.0)
    assert energy.windows == 3 and energy.window_s is not None and energy.window_s >= 0.1
    assert energy.watts == pytest.approx(100, rel=0.1)
    assert energy.call_ms == 5.0 and energy.joules == pytest.approx(0.5, rel=0.1)  # two inputs a time
    assert energy.above_idle_joules == pytest.approx(0.8 * energy.joules, rel=0.05)


def test_a_counter_that_stands_still_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flysurgery.bench.energy.STUCK_SECONDS", 0.01)
    monkeypatch.setattr(Stepping, "joules", lambda self: 1.0)
    with pytest.raises(OptionError, match="energy counter stood still"):
        Stepping()._watts(lambda: None, 1.0)


def test_the_device_always_has_something_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    now = done = 0.0

    class Mark:
        def __init__(self) -> None:
            self.at = done

        def query(self) -> bool:
            return self.at <= now

        def elapsed_time(self, end: Mark) -> float:
            return end.at - self.at

        def synchronize(self) -> None:
            nonlocal now
            now = max(now, self.at)

    def work() -> None:  # 2 ms on the device
        nonlocal done
        done = max(done, now) + 2

    monkeypatch.setattr("flysurgery.bench.energy._mark", Mark)
    busy, idle = Busy(work), 0
    for _ in range(1000):
        now += 0.1
        busy.go_on()
        idle += done <= now
    assert idle == 0 and done - now <= 2 * 20, "parts of ten works, one of them ahead"
    assert busy.work_ms() == pytest.approx(2)
