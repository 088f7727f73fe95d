"""The table of autotuned configurations."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from flysurgery.gpu import cache_folder, table
from flysurgery.gpu.table import SCHEMA, TunedCase, TunedEntry, save_entries, tuned_config, user_table
from flysurgery.patterns import Architecture

SQUARE = Architecture.of((1, 192, 48, 2), (2, 48, 192, 1))
CASE = TunedCase("Some GPU", "fused_linear", SQUARE, "fp16", 1, 25088)


@pytest.fixture(autouse=True)
def one_device(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "Some GPU")
    monkeypatch.setattr(table, "_SHIPPED", tmp_path / "shipped")
    table.forget_choices()


def entry(rows: int, warps: int, **changes: object) -> TunedEntry:
    return TunedEntry(replace(CASE, rows=rows, **changes), {"warps": warps}, 10.0)  # pyright: ignore[reportArgumentType]


def look_up(rows: int, mode: str = "fp16", linears: int = 1) -> dict[str, int] | None:
    return tuned_config("fused_linear", SQUARE, mode, linears, 0, rows)


def test_the_nearest_number_of_rows_counts_by_ratio() -> None:
    save_entries([entry(196, 4), entry(25088, 12)])
    assert look_up(25088) == {"warps": 12}
    assert look_up(1) == {"warps": 4}
    assert look_up(10**7) == {"warps": 12}
    assert look_up(2000) == {"warps": 4}  # a tenth from one, a twelfth from the other
    assert look_up(2500) == {"warps": 12}


def test_other_cases_stay_apart() -> None:
    save_entries([entry(196, 4), entry(196, 8, mode="bf16"), entry(196, 2, linears=3), entry(196, 1, device="Another GPU")])
    assert (look_up(196), look_up(196, "bf16"), look_up(196, linears=3)) == ({"warps": 4}, {"warps": 8}, {"warps": 2})
    assert look_up(196, "tf32") is None
    assert tuned_config("single_factor", SQUARE, "fp16", 1, 0, 196) is None


def test_the_users_entries_go_over_the_shipped_ones(tmp_path: Path) -> None:
    shipped = {"schema": SCHEMA, "entries": [entry(196, 4).to_json(), entry(25088, 6).to_json()]}
    (tmp_path / "shipped").mkdir()
    (tmp_path / "shipped" / "some_gpu.json").write_text(json.dumps(shipped))
    assert look_up(196) == {"warps": 4}
    save_entries([entry(196, 12)])
    assert (look_up(196), look_up(25088)) == ({"warps": 12}, {"warps": 6})


def test_saving_again_replaces_and_keeps() -> None:
    save_entries([entry(196, 4), entry(25088, 6)])
    path = save_entries([entry(196, 8)])
    assert path == user_table()
    assert (look_up(196), look_up(25088)) == ({"warps": 8}, {"warps": 6})
    assert [file.name for file in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize("content", ["", "{", "[]", '{"schema": 99, "entries": []}', '{"schema": 1, "entries": [{"rows": "x"}]}'])
def test_a_damaged_table_is_ignored_and_replaced(content: str, cache: Path) -> None:
    save_entries([entry(0, 4)])  # of no rows, which no call has
    assert look_up(196) is None
    user_table().write_text(content)
    assert look_up(196) is None
    save_entries([entry(196, 4)])
    assert look_up(196) == {"warps": 4}


def test_an_unwritable_folder_costs_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("FLYSURGERY_CACHE", str(tmp_path / "file"))
    monkeypatch.setattr(cache_folder, "_warned", set())
    with pytest.warns(RuntimeWarning, match="autotuned configurations cannot be kept"):
        save_entries([entry(196, 4)])


def test_shipped_tables_are_whole() -> None:
    for path in (Path(table.__file__).parent / "tuned").glob("*.json"):
        fields = json.loads(path.read_text())
        assert fields["schema"] == SCHEMA
        assert len(table._read(path)) == len(fields["entries"]) > 0
