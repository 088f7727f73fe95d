"""The table of autotuned configurations."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from flysurgery.gpu import tuned_table
from flysurgery.gpu.tuned_table import SCHEMA, TunedCase, TunedEntry, save_entries, tuned_config, user_table
from flysurgery.patterns import Architecture

SQUARE = Architecture.of((1, 192, 48, 2), (2, 48, 192, 1))
CASE = TunedCase("Some GPU", "fused_linear", SQUARE, "fp16", 1, 25088)


@pytest.fixture(autouse=True)
def one_device(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "Some GPU")
    monkeypatch.setattr(tuned_table, "_SHIPPED", tmp_path / "shipped")
    tuned_table.forget_choices()


def entry(rows: int, warps: int, **changes: object) -> TunedEntry:
    return TunedEntry(replace(CASE, rows=rows, **changes), {"warps": warps}, 1.0)  # pyright: ignore[reportArgumentType]


def warps(rows: int, mode: str = "fp16", linears: int = 1) -> int | None:
    found = tuned_config("fused_linear", SQUARE, mode, linears, 0, rows)
    return None if found is None else found["warps"]


def test_the_nearest_number_of_rows_counts_by_ratio() -> None:
    save_entries([entry(196, 4), entry(25088, 12)])
    assert [warps(rows) for rows in (1, 196, 25088, 10**7)] == [4, 4, 12, 12]
    assert (warps(2000), warps(2500)) == (4, 12)  # 2000 is a tenth from one, a twelfth from the other


def test_other_cases_stay_apart() -> None:
    save_entries([entry(196, 4), entry(196, 8, mode="bf16"), entry(196, 2, linears=3), entry(196, 1, device="Another GPU")])
    assert (warps(196), warps(196, "bf16"), warps(196, linears=3), warps(196, "tf32")) == (4, 8, 2, None)
    assert tuned_config("single_factor", SQUARE, "fp16", 1, 0, 196) is None


def test_the_users_entries_go_over_the_shipped_ones_and_over_older_ones(tmp_path: Path) -> None:
    shipped = {"schema": SCHEMA, "entries": [entry(196, 4).to_json(), entry(25088, 6).to_json()]}
    (tmp_path / "shipped").mkdir()
    (tmp_path / "shipped" / "some_gpu.json").write_text(json.dumps(shipped))
    assert warps(196) == 4
    save_entries([entry(196, 12), entry(10**6, 16)])
    assert (warps(196), warps(25088)) == (12, 6)
    path = save_entries([entry(196, 8)])
    assert (warps(196), warps(25088), warps(10**6)) == (8, 6, 16)
    assert path == user_table() and [*path.parent.iterdir()] == [path]


@pytest.mark.parametrize("content", ["", "{", "[]", '{"schema": 99, "entries": []}', '{"schema": 1, "entries": [{"rows": "x"}]}'])
def test_a_damaged_table_is_ignored_and_replaced(content: str, cache: Path) -> None:
    save_entries([entry(0, 4)])  # of no rows, which no call has
    assert warps(196) is None
    user_table().write_text(content)
    assert warps(196) is None
    save_entries([entry(196, 4)])
    assert warps(196) == 4


def test_shipped_tables_are_whole() -> None:
    for path in (Path(tuned_table.__file__).parent / "tuned").glob("*.json"):
        fields = json.loads(path.read_text())
        assert fields["schema"] == SCHEMA
        assert len(tuned_table._read(path)) == len(fields["entries"]) > 0
