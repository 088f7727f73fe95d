"""Rows of a measurement on stdout, as a table or as one JSON document, and as a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from flysurgery.cli.tables import print_table

TITLES = {"median_ms": "median ms", "iqr_ms": "iqr ms", "ratio_to_dense": "/ dense", "paper_ratio": "paper", "share_of_bound": "of bound"}
FORMATS = {"median_ms": ".3f", "iqr_ms": ".3f", "bound_ms": ".3f", "ratio_to_dense": ".2f", "share_of_bound": ".0%", "error": ".1e"}
TIMES = ("median_ms", "iqr_ms", "ratio_to_dense", "share_of_bound", "error", "status")
"""The columns that every measurement ends with."""


def print_records(records: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> None:
    """Print some columns of the records; numbers short, and to the right."""
    titles = [TITLES.get(name, name.replace("_", " ")) for name in columns]
    numbers = {
        title for name, title in zip(columns, titles, strict=True) if name in FORMATS or all(_number(each[name]) for each in records)
    }
    print_table(titles, [[_short(name, record[name]) for name in columns] for record in records], right=numbers)


def _short(name: str, text: Any) -> str:
    if text in ("", None):
        return ""
    return format(float(text), FORMATS[name]) if name in FORMATS else str(text)


def _number(text: Any) -> bool:
    try:
        float(text or 0)
    except (TypeError, ValueError):
        return False
    return True
