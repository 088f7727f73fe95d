"""Result rows, each with the stamp of its run, as CSV or JSON."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flysurgery.bench.stamp import Stamp

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Record = dict[str, Any]


def flat(row: DataclassInstance) -> Record:
    """The fields of a row by name; those of a dataclass in one of its fields stand in that field's place."""
    record: Record = {}
    for field in fields(row):
        value = getattr(row, field.name)
        if is_dataclass(value) and not isinstance(value, type):
            record |= flat(value)
        else:
            record[field.name] = value
    return record


def to_json(rows: Sequence[DataclassInstance], stamp: Stamp) -> dict[str, Any]:
    """One document: the stamp once, and the rows."""
    return {"stamp": flat(stamp), "rows": [flat(row) for row in rows]}


def write_csv(path: Path, rows: Sequence[DataclassInstance], stamp: Stamp) -> None:
    """Write the rows, the stamp repeated in the last columns; an existing file is replaced whole or not at all."""
    write_records(path, [flat(row) | flat(stamp) for row in rows])


def write_records(path: Path, records: Sequence[Mapping[str, Any]]) -> None:
    """Write records of the same columns; an existing file is replaced whole or not at all."""
    text = _as_text(records, header=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        unfinished.write_text(text, encoding="utf-8")
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def append_records(path: Path, records: Sequence[Mapping[str, Any]]) -> None:
    """Add records to a file of the same columns that ``write_records`` has written."""
    with path.open("a", encoding="utf-8") as file:
        file.write(_as_text(records, header=False))


def _as_text(records: Sequence[Mapping[str, Any]], *, header: bool) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(records[0]), lineterminator="\n")
    if header:
        writer.writeheader()
    writer.writerows({key: cell(value) for key, value in record.items()} for record in records)
    return text.getvalue()


def read_records(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV file as texts; none where there is no file."""
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return [{key: value or "" for key, value in row.items() if key is not None} for row in csv.DictReader(file)]


def cell(value: object) -> str:
    """How a value stands in a CSV file: numbers to four digits, None as nothing."""
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def records_of(rows: Iterable[DataclassInstance], stamp: Stamp) -> list[Record]:
    """The rows with their stamp, as a CSV file shows them."""
    return [{key: cell(value) for key, value in (flat(row) | flat(stamp)).items()} for row in rows]


def typed(records: Sequence[Record]) -> dict[str, Any]:
    """Texts as one JSON document: the last row's stamp once, numbers as numbers, None where a cell is empty."""
    names = [field.name for field in fields(Stamp)]
    stamp = {name: records[-1][name] or None for name in names} if records else {}
    return {"stamp": stamp, "rows": [{key: _value(text) for key, text in record.items() if key not in names} for record in records]}


def _value(text: str) -> object:
    if text in ("True", "False"):
        return text == "True"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text or None
