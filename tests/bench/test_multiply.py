"""The rows of ``bench multiply``: what is compared with what, and that wrong results get no time."""

from __future__ import annotations

from itertools import chain

import pytest
from torch import Tensor

from flysurgery.bench import MultiplyRow, Protocol, bench_multiply
from flysurgery.bench import multiply as module
from flysurgery.bench.ceilings import Ceilings
from flysurgery.errors import OptionError, PatternError
from flysurgery.ops import BACKENDS
from flysurgery.ops.backends.bmm import BmmBackend
from flysurgery.patterns import Pattern

FEW = Protocol(rounds=2)


@pytest.fixture(autouse=True)
def _known_ceilings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "measure_ceilings", lambda mode, device, *, quick: Ceilings(bytes_per_ms=1e3, flops_per_ms=1e3))


def rows_of(arch: str, **settings: object) -> list[MultiplyRow]:
    return list(chain.from_iterable(bench_multiply(arch, protocol=FEW, **settings)))  # pyright: ignore[reportArgumentType]


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
                assert row.error is not None
                assert row.error < 1e-6
                assert None not in timed
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
        product = x.new_zeros(x.shape[0], pattern.out_features)
        product[:-1] = right(self, x, prepared, pattern)[:-1]
        return product

    right = BmmBackend.multiply
    monkeypatch.setattr(BmmBackend, "multiply", without_last_row)
    row = next(row for row in rows_of("gonon", width=48, rows=40) if row.candidate == "bmm").measured
    assert row.status.startswith("wrong: relative error 0.")
    assert row.median_ms is None
    assert row.ratio_to_dense is None


def test_layers_that_an_architecture_does_not_fit_are_left_out() -> None:
    layers = {row.layer for row in rows_of("gonon", width=8, rows=4)}  # 6 does not divide 8, which up and down need
    assert layers == {"square"}


def test_a_width_that_fits_no_layer_is_refused() -> None:
    with pytest.raises(PatternError, match="no layer of width 7 has an architecture 'gonon'"):
        rows_of("gonon", width=7, rows=4)


def test_an_unknown_architecture_is_refused() -> None:
    with pytest.raises(OptionError, match="dense"):
        rows_of("dense", width=8, rows=4)


def test_16_bits_are_measured_too() -> None:
    rows = rows_of("lowrank", width=16, rows=8, mode="bf16")
    assert {row.mode for row in rows} == {"bf16"}
    assert all(row.measured.error > 1e-3 for row in rows if row.measured.error is not None)
    assert {row.candidate: row.backend for row in rows}["layer"] == "bmm"


def test_layers_that_are_done_are_left_out() -> None:
    rows = list(bench_multiply("monarch", width=8, rows=4, protocol=FEW, done=lambda key: key["layer"] != "up"))
    assert {row.layer for row in chain.from_iterable(rows)} == {"up"}
