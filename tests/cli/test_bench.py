"""``flysurgery bench``."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from flysurgery.cli import main

SMALL = ["bench", "multiply", "--arch", "lowrank", "--width", "16", "--rows", "8", "--rounds", "2", "--device", "cpu"]


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_multiply_prints_a_table_and_writes_the_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "rows.csv"
    assert main([*SMALL, "--threads", "1", "--out", str(path)]) == 0
    title, *lines = capsys.readouterr().out.splitlines()
    assert title.split() == ["arch", "layer", "candidate", "median", "ms", "iqr", "ms", "/", "dense", "error", "status"]
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(lines) == len(rows)
    assert {row["threads"] for row in rows} == {"1"}
    assert {row["architecture"] for row in rows if row["layer"] == "square"} == {"(1,16,4,1),(1,4,16,1)"}
    for line, row in zip(lines, rows, strict=True):
        assert line.split()[:3] == [row["arch"], row["layer"], row["candidate"]]
        assert line.endswith(row["status"])


def test_multiply_prints_one_json_document(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--dtype", "bfloat16", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["stamp"]["torch"] == torch.__version__
    assert {row["dtype"] for row in document["rows"]} == {"bfloat16"}
    assert [row["ratio_to_dense"] for row in document["rows"] if row["candidate"] == "linear"] == [1.0, 1.0, 1.0]


def test_a_width_that_fits_no_layer_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "multiply", "--arch", "gonon", "--width", "7", "--rows", "8", "--device", "cpu"]) == 1
    assert capsys.readouterr().err.startswith("flysurgery: no layer of width 7 has an architecture 'gonon'")


def test_unknown_options_are_usage_errors() -> None:
    assert main(["bench", "multiply", "--arch", "butterfly"]) == 2
    assert main(["bench", "multiply", "--rounds", "1"]) == 2
