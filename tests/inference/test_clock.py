"""Times on a CPU are medians of so many calls that a few delayed ones do not decide."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from flysurgery.inference import clock


@pytest.mark.parametrize("ms", [0.1, 200.0])
def test_delayed_calls_do_not_decide(monkeypatch: pytest.MonkeyPatch, ms: float) -> None:
    now, calls = [0.0], {"slow": 0, "fast": 0}

    def way(name: str, own_ms: float, delayed: range) -> Callable[[torch.Tensor], None]:
        def run(_: torch.Tensor) -> None:
            now[0] += (60 * own_ms if calls[name] in delayed else own_ms) / 1e3
            calls[name] += 1

        return run

    monkeypatch.setattr(clock.time, "perf_counter", lambda: now[0])
    found = clock.medians_ms((way("slow", 2 * ms, range(0)), way("fast", ms, range(1, 5))), [torch.zeros(1)])
    assert found == pytest.approx((2 * ms, ms))
    assert calls["slow"] == calls["fast"] >= 10 and (ms > 1 or calls["fast"] > 50)
