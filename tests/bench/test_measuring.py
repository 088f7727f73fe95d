"""What a row may say: wrong results get no time, and a run whose twins differ says noisy."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from flysurgery.bench import Case, Measured, Protocol, measure
from flysurgery.bench.ceilings import Ceilings, Work
from flysurgery.bench.measuring import checked_rows
from flysurgery.bench.timing import Timing

X = torch.tensor([[1.0], [2.0], [3.0], [4.0]])


@pytest.fixture(autouse=True)
def _known_times(monkeypatch: pytest.MonkeyPatch) -> None:
    times = {"fast": 0.5, "dense again": 2.02, "noisy again": 3.0}
    name = "flysurgery.bench.measuring.time_interleaved"
    monkeypatch.setattr(name, lambda runs, x, **rest: {each: Timing(times.get(each, 2.0), 0.5, 1.5) for each in runs})
    monkeypatch.setattr("flysurgery.bench.measuring.measure_ceilings", lambda mode, device: Ceilings(1000.0, 100.0))


def not_finite(x: Tensor) -> Tensor:
    return torch.full_like(x, torch.nan)


def right(x: Tensor) -> Tensor:
    return 3 * x * (1 + 1e-6)


def found(runs: dict[str, Any], x: Tensor = X, **more: Any) -> dict[str, Measured]:
    rows = more.get("rows", range(len(x)))
    return measure(Case(runs, x, 3 * x[list(rows)].double(), **more), Protocol(), "fp32")


def test_ratios_bounds_and_twins() -> None:
    rows = found({"dense": right, "fast": right, "absent": "no: not here"}, works=Work(100, 30))
    assert list(rows) == ["dense", "dense again", "fast", "absent"]
    fast = rows["fast"]
    assert (fast.ratio_to_dense, fast.bound_ms, fast.share_of_bound) == (0.25, 0.3, 0.6), "30 operations take longer than 100 bytes"
    assert fast.noise == pytest.approx(0.01) and (fast.status, fast.launch) == ("ok", "eager"), "the CPU knows no graphs"
    noisy = found({"noisy": right, "fast": right}, baseline="noisy")
    assert {row.status for row in noisy.values()} == {"noisy: noisy timed twice differs by 50%"} and noisy["fast"].median_ms == 0.5


def test_wrong_failing_and_refused_candidates_get_no_time() -> None:
    def fails(x: Tensor) -> Tensor:
        raise RuntimeError("no kernel\nwith details")

    runs = {"dense": right, "double": lambda x: 6 * x, "nan": not_finite, "shape": lambda x: 3 * x[:2], "fails": fails}
    rows = found({**runs, "absent": "no: not here", "coarse": lambda x: 3.03 * x}, allowed={"coarse": 0.02})
    said = {"double": "wrong: relative error 1", "nan": "wrong: relative error inf", "shape": "wrong: relative error inf"}
    said |= {"fails": "failed: no kernel", "absent": "no: not here"}
    assert {name: row.status for name, row in rows.items() if row.median_ms is None} == said
    rows = found({"dense": not_finite, "double": lambda x: 6 * x, "right": right})
    assert [row.status.partition(":")[0] for row in rows.values()] == ["wrong", "wrong", "ok"], "a wrong baseline excuses nobody"
    assert rows["right"].ratio_to_dense is None


def test_errors_in_the_last_rows_are_seen() -> None:
    x = torch.arange(1.0, 101.0).unsqueeze(1)
    rows = checked_rows(100, 3)
    assert rows == [0, 1, 2, 97, 98, 99] and checked_rows(6, 3) == list(range(6))
    cut = found({"dense": right, "cut": lambda x: torch.cat((3 * x[:-1], torch.zeros_like(x[-1:])))}, x, rows=rows)
    assert cut["cut"].status.startswith("wrong")
