"""Result rows, each with the stamp of its run, as CSV or JSON."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_type_hints

from flysurgery.bench.files import replace_text
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


def columns_of(kind: type[DataclassInstance]) -> list[str]:
    """The names that ``flat`` gives to the rows of a class, in their order."""
    hints = get_type_hints(kind)
    found: list[str] = []
    for field in fields(kind):
        inner = hints[field.name]
        found += columns_of(inner) if isinstance(inner, type) and is_dataclass(inner) else [field.name]
    return found


def write_records(path: Path, records: Sequence[Mapping[str, Any]]) -> None:
    """Write records of the same columns; an existing file is replaced whole or not at all."""
    replace_text(path, as_csv(records))


def as_csv(records: Sequence[Mapping[str, Any]], *, header: bool = True) -> str:
    """Records of the same columns as lines of a CSV file; nothing where there are none."""
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(records[0]) if records else [], lineterminator="\n")
    if header and records:
        writer.writeheader()
    writer.writerows({key: cell(value) for key, value in record.items()} for record in records)
    return text.getvalue()


def read_table(path: Path) -> tuple[list[str], list[Record]]:
    """The columns of a CSV file and its rows as texts; none of both where there is no file.

    Raises:
        ValueError: the file holds no text.
    """
    if not path.exists():
        return [], []
    with path.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        return list(reader.fieldnames or []), [{key: value or "" for key, value in row.items() if key is not None} for row in reader]


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
