"""What a row may say: wrong results get no time, and a run whose twins differ says noisy."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from flysurgery.bench.ceilings import Ceilings, Work
from flysurgery.bench.measuring import Protocol, checked_rows, measure
from flysurgery.bench.timing import Timing

X = torch.tensor([[1.0], [2.0], [3.0], [4.0]])
TRUTH = 3 * X.double()


def fixed_times(monkeypatch: pytest.MonkeyPatch, times: dict[str, float]) -> None:
    monkeypatch.setattr(
        "flysurgery.bench.measuring.time_interleaved", lambda runs, x, **rest: {name: Timing(times[name], 0.5, 1.5) for name in runs}
    )


def not_finite(x: Tensor) -> Tensor:
    return torch.full_like(x, torch.nan)


def slightly_off(x: Tensor) -> Tensor:
    return 3 * x * (1 + 1e-6)


def test_ratios_bounds_and_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    fixed_times(monkeypatch, {"dense": 2.0, "dense again": 2.02, "fast": 0.5})
    found = measure({"dense": slightly_off, "fast": slightly_off}, X, TRUTH, works=Work(100, 30), ceilings=Ceilings(1000.0, 100.0))
    assert found["fast"].ratio_to_dense == 0.25
    assert found["fast"].bound_ms == 0.3  # 30 operations at 100 a millisecond take longer than 100 bytes at 1000
    assert found["fast"].share_of_bound == 0.6
    assert found["fast"].noise == pytest.approx(0.01)
    assert {row.status for row in found.values()} == {"ok"}
    assert {row.launch for row in found.values()} == {"eager"}  # the CPU knows no graphs


def test_twins_that_differ_make_all_rows_noisy(monkeypatch: pytest.MonkeyPatch) -> None:
    fixed_times(monkeypatch, {"dense": 2.0, "dense again": 3.0, "fast": 0.5})
    found = measure({"dense": slightly_off, "fast": slightly_off}, X, TRUTH)
    assert {row.status for row in found.values()} == {"noisy: dense timed twice differs by 50%"}
    assert found["fast"].median_ms == 0.5


def test_wrong_failing_and_refused_candidates_get_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(x: Tensor) -> Tensor:
        raise RuntimeError("no kernel\nwith details")

    fixed_times(monkeypatch, {"dense": 1.0, "dense again": 1.0, "coarse": 1.0})
    runs = {"dense": slightly_off, "double": lambda x: 6 * x, "nan": not_finite, "other shape": lambda x: 3 * x[:2], "fails": fails}
    found = measure({**runs, "coarse": lambda x: 3.03 * x}, X, TRUTH, refused={"absent": "no: not here"}, allowed={"coarse": 0.02})
    assert found["double"].status == "wrong: relative error 1"
    assert found["nan"].status.startswith("wrong")
    assert found["other shape"].status.startswith("wrong")
    assert found["fails"].status == "failed: no kernel"
    assert found["absent"].status == "no: not here"
    assert found["coarse"].status == "ok"
    assert {name for name, row in found.items() if row.median_ms is None} == {"double", "nan", "other shape", "fails", "absent"}


def test_errors_in_the_last_rows_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def forgets_the_tail(x: Tensor) -> Tensor:
        return torch.cat((3 * x[:-1], torch.zeros_like(x[-1:])))

    fixed_times(monkeypatch, {"dense": 1.0, "dense again": 1.0})
    x = torch.arange(1.0, 101.0).unsqueeze(1)
    rows = checked_rows(100, 3)
    assert rows == [0, 1, 2, 97, 98, 99]
    found = measure({"dense": slightly_off, "cut": forgets_the_tail}, x, 3 * x[rows].double(), rows=rows, protocol=Protocol(rounds=2))
    assert found["cut"].status.startswith("wrong")


def test_a_baseline_that_is_wrong_itself_excuses_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    fixed_times(monkeypatch, {"right": 1.0})
    found = measure({"dense": not_finite, "double": lambda x: 6 * x, "right": slightly_off}, X, TRUTH)
    assert {name: row.status.partition(":")[0] for name, row in found.items()} == {"dense": "wrong", "double": "wrong", "right": "ok"}
    assert found["right"].median_ms == 1.0 and found["right"].ratio_to_dense is None
