"""The rows of ``bench multiply``: what is compared with what, and that wrong results get no time."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from flysurgery.bench import bench_multiply
from flysurgery.errors import OptionError, PatternError
from flysurgery.ops import BACKENDS
from flysurgery.ops.backends.bmm import BmmBackend
from flysurgery.patterns import Pattern


def test_every_backend_has_a_row_on_every_layer() -> None:
    rows = list(bench_multiply("monarch", width=16, rows=600, rounds=2))
    assert [row.layer for row in rows[:: 2 + len(BACKENDS)]] == ["square", "up", "down"]
    for layer in ("square", "up", "down"):
        by_name = {row.candidate: row for row in rows if row.layer == layer}
        assert set(by_name) == {"linear", "layer", *BACKENDS}
        assert by_name["linear"].ratio_to_dense == 1.0
        assert by_name["layer"].backend == "chunked"
        for row in by_name.values():
            timed = [row.median_ms, row.iqr_ms, row.ratio_to_dense]
            if row.status == "ok":
                assert row.error is not None
                assert row.error < 1e-6
                assert None not in timed
            else:
                assert timed == [None, None, None]
        assert by_name["cuda"].status == "it needs tensors on a CUDA device, these are on cpu"
    assert (rows[0].architecture, rows[0].density) == ("(1,4,4,4),(4,4,4,1)", 0.5)


def test_a_wrong_backend_gets_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    def without_last_row(self: BmmBackend, x: Tensor, prepared: Tensor, pattern: Pattern) -> Tensor:
        product = x.new_zeros(x.shape[0], pattern.out_features)
        product[:-1] = right(self, x, prepared, pattern)[:-1]
        return product

    right = BmmBackend.multiply
    monkeypatch.setattr(BmmBackend, "multiply", without_last_row)
    row = next(row for row in bench_multiply("gonon", width=48, rows=40, rounds=2) if row.candidate == "bmm")
    assert row.status.startswith("wrong: relative error 0.")
    assert row.median_ms is None
    assert row.ratio_to_dense is None


def test_layers_that_an_architecture_does_not_fit_are_left_out() -> None:
    layers = {row.layer for row in bench_multiply("gonon", width=8, rows=4, rounds=2)}  # 6 does not divide 8, which up and down need
    assert layers == {"square"}


def test_a_width_that_fits_no_layer_is_refused() -> None:
    with pytest.raises(PatternError, match="no layer of width 7 has an architecture 'gonon'"):
        list(bench_multiply("gonon", width=7, rows=4, rounds=2))


def test_an_unknown_architecture_is_refused() -> None:
    with pytest.raises(OptionError, match="dense"):
        list(bench_multiply("dense", width=8, rows=4))


def test_16_bits_are_measured_too() -> None:
    rows = list(bench_multiply("lowrank", width=16, rows=8, dtype=torch.bfloat16, rounds=2))
    assert {row.dtype for row in rows} == {"bfloat16"}
    assert {row.candidate: row.backend for row in rows}["layer"] == "bmm"
