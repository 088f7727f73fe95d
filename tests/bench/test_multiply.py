"""The rows of ``bench multiply``: what is compared with what, and that wrong results get no time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from flysurgery.bench import Protocol, Record
from flysurgery.bench.ceilings import Ceilings
from flysurgery.bench.multiply import multiply_jobs
from flysurgery.errors import OptionError, PatternError
from flysurgery.ops import BACKENDS
from flysurgery.ops.backends.bmm import BmmBackend
from flysurgery.patterns import Pattern


def rows_of(monkeypatch: pytest.MonkeyPatch, arch: str, width: int, rows: int, mode: str = "fp32") -> list[Record]:
    monkeypatch.setattr("flysurgery.bench.measuring.measure_ceilings", lambda mode, device: Ceilings(bytes_per_ms=1e3, flops_per_ms=1e3))
    jobs = multiply_jobs(arch, width, rows, mode, torch.device("cpu"), Protocol(rounds=2))
    return [row for _, make in jobs for row in make()]


def test_every_backend_has_a_row_on_every_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = rows_of(monkeypatch, "monarch", 16, 600)
    for layer in ("square", "up", "down"):
        by_name = {row["candidate"]: row for row in rows if row["layer"] == layer}
        assert list(by_name) == ["linear", "linear again", "layer", *BACKENDS]
        assert by_name["linear"]["ratio_to_dense"] == 1.0 and by_name["layer"]["backend"] == "chunked"
        for row in by_name.values():
            timed = [row[name] for name in ("median_ms", "iqr_ms", "ratio_to_dense", "share_of_bound")]
            if row["status"] == "ok" or row["status"].startswith("noisy"):
                assert row["error"] < 1e-6 and None not in timed
            else:
                assert timed == [None] * 4
        assert by_name["cuda"]["status"] == "it needs tensors on a CUDA device, these are on cpu"
    dense, layer = rows[0], rows[2]
    assert (dense["architecture"], dense["density"]) == ("(1,4,4,4),(4,4,4,1)", 0.5)
    assert (dense["bytes_moved"], dense["flops"]) == (4 * (600 * 32 + 16 + 256), 600 * 512)
    assert (layer["bytes_moved"], layer["flops"]) == (4 * (600 * 32 + 16 + 128), 600 * 256)
    assert layer["bound_ms"] == 600 * 256 / 1e3, "these ceilings make it a matter of arithmetic"


def test_a_wrong_backend_gets_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    def without_last_row(self: BmmBackend, x: Tensor, prepared: Any, pattern: Pattern) -> Tensor:
        product = right(self, x, prepared, pattern).clone()
        product[-1] = 0
        return product

    right = BmmBackend.multiply
    monkeypatch.setattr(BmmBackend, "multiply", without_last_row)
    row = next(row for row in rows_of(monkeypatch, "gonon", 48, 40, "bf16") if row["candidate"] == "bmm")
    assert row["status"].startswith("wrong: relative error 0.") and row["median_ms"] is None


def test_what_does_not_fit_is_left_out_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert {row["layer"] for row in rows_of(monkeypatch, "gonon", 8, 4)} == {"square"}, "up and down need multiples of 6"
    with pytest.raises(PatternError, match="no layer of width 7 has an architecture 'gonon'"):
        rows_of(monkeypatch, "gonon", 7, 4)
    with pytest.raises(OptionError, match="dense"):
        rows_of(monkeypatch, "dense", 8, 4)
