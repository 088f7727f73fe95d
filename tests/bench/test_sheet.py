"""Rows of an interrupted run are kept where they may stand beside new ones."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from flysurgery.bench import Sheet, sheet, take_stamp
from flysurgery.errors import OptionError

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Row:
    name: str
    ms: float | None


def test_rows_of_the_same_setting_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    first = Sheet(path, CPU)
    first.add([Row("a", 1.25)])
    assert first.has({"name": "a"}) and not first.has({"name": "b"})
    first.add([Row("b", None)])
    assert first.has({"name": "b"})
    second = Sheet(path, CPU)
    assert second.has({"name": "a"}) and second.has({"name": "b", "ms": None}) and not second.has({"name": "c"})
    second.add([Row("c", 3.0)])
    assert [record["name"] for record in Sheet(path, CPU).records] == ["a", "b", "c"]
    assert Sheet(path, CPU, fresh=True).records == []


def test_rows_of_another_version_are_measured_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rows.csv"
    Sheet(path, CPU).add([Row("a", 1.0)])
    now = take_stamp(CPU)
    monkeypatch.setattr(sheet, "take_stamp", lambda device: replace(now, date="2000-01-01"))
    assert Sheet(path, CPU).has({"name": "a"})
    monkeypatch.setattr(sheet, "take_stamp", lambda device: replace(now, commit="another"))
    later = Sheet(path, CPU)
    assert (later.records, later.dropped) == ([], 1)


def test_a_file_that_holds_something_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("fruit,price\napple,1\n")
    with pytest.raises(OptionError, match="fruit, price"):
        Sheet(path, CPU)
    assert path.read_text() == "fruit,price\napple,1\n"
