"""Rows as texts and on disk, and what an interrupted run keeps of them."""

from pathlib import Path

import pytest
import torch

from flysurgery.bench import Sheet, rows, take_stamp
from flysurgery.bench.rows import STAMP, read_table, typed
from flysurgery.errors import OptionError
from tests.support.processes import kills, run_apart

CPU = torch.device("cpu")
COLUMNS = ("name", "ms")


def test_rows_carry_a_stamp_of_this_machine_into_csv_and_json(tmp_path: Path) -> None:
    path = tmp_path / "new" / "rows.csv"
    texts = Sheet(path, CPU, COLUMNS).add([{"name": "(1,2,3,4),(5,6,7,8)", "ms": 1.23456789, "other": 1}, {"name": "refused"}])
    assert read_table(path) == (["name", "ms", *STAMP], texts) and [*path.parent.iterdir()] == [path]
    document = typed(texts)
    stamp = document["stamp"]
    assert (stamp["torch"], stamp["threads"], stamp["driver"]) == (torch.__version__, str(torch.get_num_threads()), None)
    assert stamp["device"] and stamp["commit"] and stamp.keys() == take_stamp(CPU).keys() == {*STAMP}
    assert document["rows"] == [{"name": "(1,2,3,4),(5,6,7,8)", "ms": 1.235}, {"name": "refused", "ms": None}]


def test_rows_of_the_same_setting_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rows.csv"
    for name, ms in (("a", 1.25), ("b", None), ("c", 3.0)):
        sheet = Sheet(path, CPU, COLUMNS)
        assert not sheet.rows({"name": name})
        sheet.add([{"name": name, "ms": ms}])
        assert sheet.rows({"name": name, "ms": ms}) == sheet.records[-1:]
    assert [record["name"] for record in Sheet(path, CPU, COLUMNS).records] == ["a", "b", "c"]
    assert Sheet(path, CPU, COLUMNS, fresh=True).records == []
    now = take_stamp(CPU)
    for changes, kept in (({"date": "2000-01-01"}, 3), ({"commit": "another"}, 0)):
        monkeypatch.setattr(rows, "take_stamp", lambda device, changes=changes: now | changes)
        later = Sheet(path, CPU, COLUMNS)
        assert (len(later.records), later.dropped) == (kept, 3 - kept)


@pytest.mark.parametrize("text", ["fruit,price\napple,1\n", "a letter to a friend\n", "\xff\x00"])
@pytest.mark.parametrize("fresh", [False, True])
def test_a_file_that_holds_something_else_is_refused(tmp_path: Path, text: str, fresh: bool) -> None:
    path = tmp_path / "rows.csv"
    path.write_bytes(text.encode("latin1"))
    with pytest.raises(OptionError, match=r"rows\.csv is no table of measurements, .* name another file"):
        Sheet(path, CPU, COLUMNS, fresh=fresh)
    assert path.read_bytes() == text.encode("latin1")


def test_rows_of_another_table_stay_unless_told_otherwise(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    Sheet(path, CPU, ("name", "joules")).add([{"name": "a", "joules": 1.0}])
    before = path.read_text()
    with pytest.raises(OptionError, match="a table of other measurements, or of another version, with the columns name, joules, date"):
        Sheet(path, CPU, COLUMNS)
    assert path.read_text() == before
    Sheet(path, CPU, COLUMNS, fresh=True).add([{"name": "b", "ms": 2.0}])
    assert [record["name"] for record in Sheet(path, CPU, COLUMNS).records] == ["b"]


@pytest.mark.parametrize("path", ["/dev/null", "/proc/no/rows.csv", "."])
def test_where_nothing_can_be_kept_is_said_before_measuring(path: str) -> None:
    with pytest.raises(OptionError, match=r"--out (takes a file|cannot write)"):
        Sheet(Path(path), CPU, COLUMNS)


def add_and_be_killed(path: Path) -> None:
    """The file has whole groups, of two rows each, after a kill at any moment; which of them tells whether the last was added."""

    def add() -> None:
        sheet = Sheet(path, CPU, COLUMNS)
        sheet.add({"name": f"{len(sheet.records) // 2}{kind}"} for kind in ("", " again"))

    add()
    counts = []
    for _ in kills(add):
        names = [record["name"] for record in Sheet(path, CPU, COLUMNS).records]
        assert names == [f"{group}{kind}" for group in range(len(names) // 2) for kind in ("", " again")]
        counts.append(len(names))
    assert counts == sorted(counts) and counts[0] == 2 < counts[-1]


def test_killed_at_any_moment(tmp_path: Path) -> None:
    run_apart(add_and_be_killed, tmp_path / "rows.csv")
