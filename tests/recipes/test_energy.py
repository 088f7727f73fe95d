"""Rows of energy: no joules for what is refused or wrong, twins that differ, and power read from a counter that moves in steps."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import Tensor

from flysurgery.bench.ceilings import Ceilings
from flysurgery.bench.measuring import status_of
from flysurgery.errors import OptionError
from flysurgery.patterns import Pattern

CPU = torch.device("cpu")
HOW: dict[str, Any] = {"idle_watts": 1.0, "seconds": 0.0, "windows": 2}


@pytest.fixture
def energy(monkeypatch: pytest.MonkeyPatch) -> Any:
    import energy

    monkeypatch.setattr(energy, "measure_ceilings", lambda mode, device: Ceilings(1000.0, 1e9))
    return energy


def counter(energy: Any, drift: float = 1.0) -> Any:
    """Every call takes 4 ms, the first measurement 2 joules, and each later one ``drift`` times those of the one before."""

    class Counter:
        measurements = 0

        def measure(self, run: Any, x: Tensor, **how: Any) -> Any:
            self.measurements += 1
            return energy.Energy("ok", None, 2.0 * drift ** (self.measurements - 1), call_ms=4.0)

    return Counter()


def rows_of_factor(energy: Any, drift: float = 1.0) -> dict[tuple[str, str], dict[str, Any]]:
    found = energy.energy_of_factor(counter(energy, drift), Pattern(2, 3, 4, 5), 100, "fp32", CPU, **HOW)
    return {(row["candidate"], row["layout"]): row for row in found}


def test_a_factors_rows_have_bounds_and_say_why_they_lack_joules(energy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = rows_of_factor(energy)
    bmm, absent = rows["bmm", "first"], rows["cuda", "last"]
    assert bmm["joules"] == 2.0
    assert bmm["bytes_moved"] == 4 * (100 * (40 + 30) + 120), "x, y and the entries of the factor"
    assert bmm["flops"] == 2 * 100 * 120 and bmm["share_of_bound"] == pytest.approx(bmm["bytes_moved"] / 1000 / 4.0)
    assert absent["status"].startswith("no: our kernels") and absent["joules"] is absent["noise"] is absent["share_of_bound"] is None
    monkeypatch.setattr(energy, "ks_einsum", lambda x, factor: 2 * x.new_ones(len(x), 30))
    wrong = rows_of_factor(energy)["bmm", "first"]
    assert wrong["status"].startswith("wrong") and wrong["joules"] is None


def test_twins_are_metered_among_the_others_and_make_a_run_noisy(energy: Any) -> None:
    rows = rows_of_factor(energy, drift=1.04)
    for layout in ("first", "last"):
        of = {name: row for (name, where), row in rows.items() if where == layout and row["joules"]}
        assert of.keys() == {"bmm", "bmm again", "einsum", "bsr"}
        noise = abs(of["bmm again"]["joules"] / of["bmm"]["joules"] - 1)
        assert {(each["noise"], each["status"]) for each in of.values()} == {(noise, status_of(noise, "cpu", "bmm", "metered"))}


def stepping(energy: Any) -> Any:
    """A device at 100 watts, whose counter is updated every 20 ms."""

    class Stepping(energy.EnergyMeter):
        def __init__(self) -> None:
            pass

        def joules(self) -> float:
            return 100 * (time.perf_counter() // 0.02 * 0.02)

    return Stepping()


def test_power_is_that_between_steps_of_the_counter(energy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Waiting:
        """Each call of the work takes 10 ms."""

        def __init__(self, work: Any) -> None:
            self.go_on = work

        def work_ms(self) -> float:
            return 10.0

    monkeypatch.setattr(energy, "Busy", Waiting)
    monkeypatch.setattr(energy, "all_calls", lambda *_: (lambda: time.sleep(1e-4), "eager"))
    monkeypatch.setattr(energy, "rotating", lambda x: [x, x])
    found = stepping(energy).measure(lambda x: x, torch.zeros(1), windows=3, seconds=0.1, idle_watts=20.0)
    assert found.windows == 3 and found.window_s >= 0.1 and found.watts == pytest.approx(100, rel=0.1)
    assert found.call_ms == 5.0 and found.joules == pytest.approx(0.5, rel=0.1), "two inputs a time"
    assert found.above_idle_joules == pytest.approx(0.8 * found.joules, rel=0.05)
    monkeypatch.setattr(energy, "STUCK_SECONDS", 0.01)
    still = stepping(energy)
    still.joules = lambda: 1.0
    with pytest.raises(OptionError, match="energy counter stood still"):
        still._watts(lambda: None, 1.0)


def test_the_device_always_has_something_to_do(energy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
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

    monkeypatch.setattr(energy, "_mark", Mark)
    busy, idle = energy.Busy(work), 0
    for _ in range(1000):
        now += 0.1
        busy.go_on()
        idle += done <= now
    assert idle == 0 and done - now <= 2 * 20, "parts of ten works, one of them ahead"
    assert busy.work_ms() == pytest.approx(2)
