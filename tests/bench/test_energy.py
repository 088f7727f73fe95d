"""Rows of energy, by a counter that gives what it is told: their bounds, and no joules for what is refused or wrong."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import Tensor

from flysurgery.bench.ceilings import Ceilings
from flysurgery.bench.energy import Energy, EnergyMeter
from flysurgery.bench.energy_rows import EnergyRow, energy_of_factor, energy_of_model
from flysurgery.bench.units import converted_timm
from flysurgery.bench.variants import VARIANTS
from flysurgery.patterns import Pattern

HOW: dict[str, Any] = {"idle_watts": 1.0, "seconds": 0.0, "windows": 2}
CPU = torch.device("cpu")


class Counter:
    """Every call takes 4 ms and 2 joules."""

    def measure(self, run: Any, x: Tensor, **how: Any) -> Energy:
        return Energy("ok", 2.0, call_ms=4.0)


def rows_of_factor() -> dict[tuple[str, str], EnergyRow]:
    found = energy_of_factor(Counter(), Pattern(2, 3, 4, 5), 100, "fp32", CPU, Ceilings(1000.0, 1e9), **HOW)
    return {(row.candidate, row.layout): row for row in found}


def test_a_factors_rows_have_bounds_and_say_why_they_lack_joules() -> None:
    rows = rows_of_factor()
    bmm = rows["bmm", "first"]
    assert bmm.energy.joules == 2.0
    assert bmm.bytes_moved == 4 * (100 * (40 + 30) + 120)  # x, y and the entries of the factor
    assert bmm.flops == 2 * 100 * 120
    assert bmm.bound_ms == pytest.approx(bmm.bytes_moved / 1000)
    assert bmm.share_of_bound == pytest.approx(bmm.bound_ms / 4.0)
    absent = rows["cuda", "last"]
    assert absent.energy.status.startswith("no") and absent.energy.joules is None
    assert absent.bound_ms == bmm.bound_ms and absent.share_of_bound is None


def test_a_wrong_result_has_no_joules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flysurgery.bench.energy_rows.ks_einsum", lambda x, factor: 2 * x.new_ones(len(x), 30))
    row = rows_of_factor()["bmm", "first"]
    assert row.energy.status.startswith("wrong") and row.energy.joules is None and row.share_of_bound is None


def test_a_converted_model_must_spend_less_than_dense() -> None:
    names = ("dense", "layer")
    found = energy_of_model(Counter(), "test_vit", {}, "monarch", 1, "fp32", CPU, Ceilings(1e6, 1e6), candidates=names, **HOW)
    dense, layer = found
    assert (dense.candidate, layer.candidate) == names
    assert 0 < layer.flops < dense.flops and 0 < layer.bytes_moved < dense.bytes_moved
    assert layer.share_of_bound == pytest.approx(layer.bound_ms / 4.0)


def test_windows_last_as_long_as_they_must_where_calls_are_faster_than_thought(monkeypatch: pytest.MonkeyPatch) -> None:
    class At100Watts(EnergyMeter):
        def __init__(self) -> None:
            pass

        def joules(self) -> float:
            return 100 * time.perf_counter()

        def _time(self, work: Any) -> float:
            return 10.0

    monkeypatch.setattr("flysurgery.bench.energy._work", lambda run, inputs: (lambda: time.sleep(0.0095), 1))
    energy = At100Watts().measure(lambda x: x, torch.zeros(1), windows=2, seconds=0.05, idle_watts=20.0)
    assert energy.windows == 2 and energy.window_s is not None and energy.window_s >= 0.05
    assert energy.watts == pytest.approx(100, rel=0.01)
    assert energy.joules is not None and energy.above_idle_joules == pytest.approx(0.8 * energy.joules, rel=0.01)


def test_the_dense_model_is_for_inference_as_a_whole_so_that_it_can_be_optimized() -> None:
    dense = VARIANTS["dense"](converted_timm("test_vit", {}, "monarch"))
    assert not any(module.training for module in dense.modules())
