"""Result rows, each with the stamp of its run, as CSV or JSON."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flysurgery.bench.stamp import Stamp

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


def to_json(rows: Sequence[DataclassInstance], stamp: Stamp) -> dict[str, Any]:
    """One document: the stamp once, and the rows."""
    return {"stamp": asdict(stamp), "rows": [asdict(row) for row in rows]}


def write_csv(path: Path, rows: Sequence[DataclassInstance], stamp: Stamp) -> None:
    """Write the rows, the stamp repeated in the last columns; an existing file is replaced whole or not at all."""
    records = [asdict(row) | asdict(stamp) for row in rows]
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(records[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows({key: _cell(value) for key, value in record.items()} for record in records)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        unfinished.write_text(text.getvalue(), encoding="utf-8")
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def _cell(value: object) -> object:
    return f"{value:.4g}" if isinstance(value, float) else value
