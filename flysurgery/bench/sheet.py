"""The rows of one recipe on disk, so that a run that was interrupted goes on where it stopped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from flysurgery.bench.rows import Record, append_records, cell, read_records, records_of, write_records
from flysurgery.bench.stamp import Stamp, take_stamp
from flysurgery.errors import OptionError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

SETTING = ("device", "driver", "threads", "torch", "flysurgery", "commit")
"""The columns of a stamp in which rows must agree with this run to be kept: neither the date nor the clocks."""


class Sheet:
    """Rows as texts, in a CSV file where one is named, which the first addition writes anew and later ones append to.

    Rows of an earlier run are kept where device, driver, threads and all versions are those of this run. Sources that
    differ from their commit count as one commit, ``uncommitted``: after a change to them start anew.

    Raises:
        OptionError: the file is no such table.
    """

    def __init__(self, path: Path | None, device: torch.device, *, fresh: bool = False) -> None:
        self.path = path
        self.device = device
        self.records: list[Record] = []
        self.dropped = 0
        self._written = False
        self._found: dict[tuple[str, ...], set[tuple[str | None, ...]]] = {}
        stamp = take_stamp(device)
        self._setting = {name: cell(getattr(stamp, name)) for name in SETTING}
        if path is not None and not fresh:
            self._read(path)

    def _read(self, path: Path) -> None:
        found = read_records(path)
        if found and not set(SETTING) <= set(found[0]):
            raise OptionError(f"{path} is no table of measurements, its columns are {', '.join(found[0])}; name another file with --out")
        self.records = [row for row in found if all(row.get(name) == value for name, value in self._setting.items())]
        self.dropped = len(found) - len(self.records)

    def has(self, key: Mapping[str, object]) -> bool:
        """Whether there is a row with these values."""
        wanted = {name: cell(value) for name, value in key.items()}
        names = tuple(wanted)
        if names not in self._found:
            self._found[names] = {tuple(record.get(name) for name in names) for record in self.records}
        return tuple(wanted.values()) in self._found[names]

    def add(self, rows: Sequence[DataclassInstance]) -> list[Record]:
        """Append rows with a stamp of now, write the file, and give the rows as texts."""
        if not rows:
            return []
        stamp: Stamp = take_stamp(self.device)
        new = records_of(rows, stamp)
        if self.records and list(self.records[0]) != list(new[0]):  # of another version, or another table
            self.dropped, self.records, self._written = self.dropped + len(self.records), [], False
        self.records += new
        self._found.clear()
        if self.path is not None and self._written:
            append_records(self.path, new)
        elif self.path is not None:
            write_records(self.path, self.records)
            self._written = True
        return new
