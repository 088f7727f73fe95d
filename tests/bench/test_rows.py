"""Rows on disk."""

from __future__ import annotations

import csv
import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from flysurgery.bench import Stamp, take_stamp, to_json, write_records
from flysurgery.bench.rows import flat

STAMP = Stamp(date="2026-01-02", device="a CPU", driver=None, threads=2, torch="2.11", flysurgery="0.1.0", commit="abc")


@dataclass(frozen=True)
class Row:
    name: str
    ms: float | None


def test_csv_rows_carry_the_stamp(tmp_path: Path) -> None:
    path = tmp_path / "new" / "rows.csv"
    write_records(path, [flat(row) | flat(STAMP) for row in (Row("(1,2,3,4),(5,6,7,8)", 1.23456789), Row("refused", None))])
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert rows[0] == {
        "name": "(1,2,3,4),(5,6,7,8)",
        "ms": "1.235",
        "date": "2026-01-02",
        "device": "a CPU",
        "driver": "",
        "threads": "2",
        "torch": "2.11",
        "flysurgery": "0.1.0",
        "commit": "abc",
        "clocks_mhz": "",
    }
    assert (rows[1]["name"], rows[1]["ms"]) == ("refused", "")
    assert [entry.name for entry in path.parent.iterdir()] == ["rows.csv"]


def test_an_existing_file_survives_a_failed_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("precious")

    def fail(self: Path, target: Path) -> Path:
        raise OSError("disk full")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        write_records(path, [flat(Row("a", 1.0))])
    assert path.read_text() == "precious"
    assert [entry.name for entry in tmp_path.iterdir()] == ["rows.csv"]


def test_json_holds_the_stamp_once() -> None:
    document = json.loads(json.dumps(to_json([Row("a", 1.5)], STAMP)))
    assert document["stamp"]["torch"] == "2.11"
    assert document["rows"] == [{"name": "a", "ms": 1.5}]


def test_the_stamp_describes_this_machine() -> None:
    stamp = take_stamp(torch.device("cpu"))
    assert stamp.torch == torch.__version__
    assert stamp.threads == torch.get_num_threads()
    assert stamp.device
    assert stamp.driver is None
    assert stamp.commit
