"""The rows of one recipe on disk, so that a run that was interrupted goes on where it stopped."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from flysurgery.bench.files import check_file, replace_text
from flysurgery.bench.rows import Record, as_csv, cell, columns_of, read_table, records_of
from flysurgery.bench.stamp import Stamp, take_stamp
from flysurgery.errors import OptionError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

SETTING = ("device", "driver", "threads", "torch", "flysurgery", "commit")
"""The columns of a stamp in which rows must agree with this run to be kept: neither the date nor the clocks."""


class Sheet:
    """Rows of the class ``kind`` as texts, and in a CSV file where one is named, which is whole after each addition.

    Rows of an earlier run are kept where device, driver, threads and all versions are those of this run. Sources that
    differ from their commit count as one commit, ``uncommitted``: after a change to them start anew. ``fresh`` keeps none.

    Raises:
        OptionError: the file cannot be written, or holds something else than such rows; with ``fresh``, no measurements at all.
    """

    def __init__(self, path: Path | None, device: torch.device, kind: type[DataclassInstance], *, fresh: bool = False) -> None:
        self.path = path
        self.device = device
        self.records: list[Record] = []
        self.dropped = 0
        self._columns = [*columns_of(kind), *columns_of(Stamp)]
        self._found: dict[tuple[str, ...], set[tuple[str | None, ...]]] = {}
        if path is not None:
            check_file(path, "--out")
            self._read(path, fresh=fresh)
        self._text = as_csv(self.records)

    def _read(self, path: Path, *, fresh: bool) -> None:
        try:
            columns, found = read_table(path)
        except (ValueError, csv.Error):
            columns, found = ["no text"], []
        if columns and not (set(SETTING) <= set(columns) if fresh else columns == self._columns):
            known = set(SETTING) <= set(columns)
            what = "a table of other measurements, or of another version" if known else "no table of measurements"
            names = ", ".join((*columns[:8], *(["..."] if len(columns) > 8 else ())))
            raise OptionError(f"{path} is {what}, with the columns {names}; name another file with --out")
        stamp = take_stamp(self.device)
        setting = {name: cell(getattr(stamp, name)) for name in SETTING}
        self.records = [] if fresh else [row for row in found if all(row[name] == value for name, value in setting.items())]
        self.dropped = 0 if fresh else len(found) - len(self.records)

    def rows(self, key: Mapping[str, object]) -> list[Record]:
        """The rows with these values."""
        wanted = {name: cell(value) for name, value in key.items()}
        return [record for record in self.records if all(record[name] == value for name, value in wanted.items())]

    def has(self, key: Mapping[str, object]) -> bool:
        """Whether there is a row with these values."""
        wanted = {name: cell(value) for name, value in key.items()}
        names = tuple(wanted)
        if names not in self._found:
            self._found[names] = {tuple(record.get(name) for name in names) for record in self.records}
        return tuple(wanted.values()) in self._found[names]

    def add(self, rows: Sequence[DataclassInstance]) -> list[Record]:
        """Add rows with a stamp of now, write the file, and give the rows as texts."""
        if not rows:
            return []
        new = records_of(rows, take_stamp(self.device))
        self.records += new
        self._found.clear()
        self._text += as_csv(new, header=not self._text)
        if self.path is not None:
            replace_text(self.path, self._text)
        return new
