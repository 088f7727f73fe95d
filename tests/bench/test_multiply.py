"""The rows of ``bench multiply``: what is compared with what, and that wrong results get no time."""

from __future__ import annotations

from itertools import chain
from typing import Any

import pytest
from torch import Tensor

from flysurgery.bench import MultiplyRow, Protocol, bench_multiply
from flysurgery.bench import multiply as module
from flysurgery.bench.ceilings import Ceilings
from flysurgery.errors import OptionError, PatternError
from flysurgery.ops import BACKENDS
from flysurgery.ops.backends.bmm import BmmBackend
from flysurgery.patterns import Pattern


@pytest.fixture(autouse=True)
def _known_ceilings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "measure_ceilings", lambda mode, device, *, quick: Ceilings(bytes_per_ms=1e3, flops_per_ms=1e3))


def rows_of(arch: str, **settings: Any) -> list[MultiplyRow]:
    return list(chain.from_iterable(bench_multiply(arch, protocol=Protocol(rounds=2), **settings)))


def test_every_backend_has_a_row_on_every_layer() -> None:
    rows = rows_of("monarch", width=16, rows=600)
    assert [row.layer for row in rows[:: 3 + len(BACKENDS)]] == ["square", "up", "down"]
    for layer in ("square", "up", "down"):
        by_name = {row.candidate: row for row in rows if row.layer == layer}
        assert set(by_name) == {"linear", "linear again", "layer", *BACKENDS}
        assert by_name["linear"].measured.ratio_to_dense == 1.0
        assert by_name["layer"].backend == "chunked"
        for row in (each.measured for each in by_name.values()):
            timed = [row.median_ms, row.iqr_ms, row.ratio_to_dense, row.share_of_bound]
            if row.status == "ok" or row.status.startswith("noisy"):
                assert row.error is not None and row.error < 1e-6 and None not in timed
            else:
                assert timed == [None] * 4
        assert by_name["cuda"].measured.status == "it needs tensors on a CUDA device, these are on cpu"
    assert (rows[0].architecture, rows[0].density) == ("(1,4,4,4),(4,4,4,1)", 0.5)
    dense, layer = rows[0].measured, rows[2].measured
    assert (dense.bytes_moved, dense.flops) == (4 * (600 * 32 + 16 + 256), 600 * 512)
    assert (layer.bytes_moved, layer.flops) == (4 * (600 * 32 + 16 + 128), 600 * 256)
    assert layer.bound_ms == 600 * 256 / 1e3  # these ceilings make it a matter of arithmetic


def test_a_wrong_backend_gets_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    def without_last_row(self: BmmBackend, x: Tensor, prepared: Tensor, pattern: Pattern) -> Tensor:
        product = right(self, x, prepared, pattern).clone()
        product[-1] = 0
        return product

    right = BmmBackend.multiply
    monkeypatch.setattr(BmmBackend, "multiply", without_last_row)
    row = next(row for row in rows_of("gonon", width=48, rows=40) if row.candidate == "bmm").measured
    assert row.status.startswith("wrong: relative error 0.")
    assert row.median_ms is None and row.ratio_to_dense is None


def test_what_does_not_fit_is_left_out_or_refused() -> None:
    assert {row.layer for row in rows_of("gonon", width=8, rows=4)} == {"square"}  # up and down need multiples of 6
    with pytest.raises(PatternError, match="no layer of width 7 has an architecture 'gonon'"):
        rows_of("gonon", width=7, rows=4)
    with pytest.raises(OptionError, match="dense"):
        rows_of("dense", width=8, rows=4)


def test_16_bits_are_measured_too_and_layers_that_are_done_are_left_out() -> None:
    rows = rows_of("lowrank", width=16, rows=8, mode="bf16", done=lambda key: key["layer"] != "up")
    assert {(row.mode, row.layer) for row in rows} == {("bf16", "up")}
    assert all(row.measured.error > 1e-3 for row in rows if row.measured.error is not None)
    assert {row.candidate: row.backend for row in rows}["layer"] == "bmm"
