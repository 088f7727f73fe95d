"""Rows of results as texts, with a stamp of where and with what they were taken, and in CSV files that an interrupted run goes on with."""

import csv
import io
import os
import platform
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime, timezone
from functools import cache
from pathlib import Path
from typing import Any

import torch

import flysurgery
from flysurgery.errors import OptionError, first_line

Record = dict[str, Any]
Job = tuple[Record, Callable[[], Iterable[Record]]]  # the columns that tell one group of rows from the others, and what measures them
STAMP = ("date", "device", "driver", "threads", "torch", "flysurgery", "commit", "clocks_mhz")
"""The columns that a row needs besides its numbers so that it can be compared or repeated."""

SETTING = ("device", "driver", "threads", "torch", "flysurgery", "commit")
"""The columns of a stamp in which kept rows must agree with this run: neither the date nor the clocks."""


def take_stamp(device: torch.device) -> Record:
    """Describe this machine, the software on it and the state of the sources now.

    The driver and the clocks (multiprocessors/memory) are None where nvidia-smi does not tell them.
    """
    cuda = device.type == "cuda"
    driver, *clocks = _asked_of_gpu(device) if cuda else [""]
    return {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "device": torch.cuda.get_device_name(device) if cuda else _cpu_name(),
        "driver": driver or None,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "flysurgery": flysurgery.__version__,
        "commit": _commit(),
        "clocks_mhz": "/".join(clocks) or None,
    }


def _asked_of_gpu(device: torch.device) -> list[str]:
    query = "--query-gpu=driver_version,clocks.sm,clocks.mem"
    line = _first_line("nvidia-smi", query, "--format=csv,noheader,nounits", f"--id=GPU-{torch.cuda.get_device_properties(device).uuid}")
    return line.split(", ") if line else [""]


def _cpu_name() -> str:
    information = Path("/proc/cpuinfo")
    lines = information.read_text().splitlines() if information.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return next(iter(names), platform.processor() or platform.machine())


@cache
def _commit() -> str:
    """Give the commit of the sources at the first stamp of this process.

    It is ``uncommitted`` where the sources differ from their commit or there is none, and ``installed`` outside git.
    """
    git = ("git", "-C", str(Path(flysurgery.__file__).parent))
    if _first_line(*git, "rev-parse", "--is-inside-work-tree") != "true":
        return "installed"
    if _first_line(*git, "status", "--porcelain", "--", ".") is not None:
        return "uncommitted"
    return _first_line(*git, "rev-parse", "--short=12", "HEAD") or "uncommitted"


def _first_line(*command: str) -> str | None:
    try:
        output = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
    return output.splitlines()[0] if output else None


def cell(value: object) -> str:
    """Give a value as it stands in a CSV file: numbers to four digits, None as an empty cell."""
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def typed(records: Sequence[Record]) -> Record:
    """Give records as one JSON document: the stamp of the last row once, numbers as numbers, None for an empty cell."""
    stamp = {name: records[-1][name] or None for name in STAMP} if records else {}
    return {"stamp": stamp, "rows": [{key: _value(text) for key, text in record.items() if key not in STAMP} for record in records]}


def _value(text: str) -> object:
    if text in ("True", "False"):
        return text == "True"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text or None


def as_csv(records: Sequence[Mapping[str, Any]], *, header: bool = True) -> str:
    """Give records of the same columns as lines of a CSV file; an empty text where there are none."""
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(records[0]) if records else [], lineterminator="\n")
    if header and records:
        writer.writeheader()
    writer.writerows({key: cell(value) for key, value in record.items()} for record in records)
    return text.getvalue()


def read_table(path: Path) -> tuple[list[str], list[Record]]:
    """Read the columns of a CSV file and its rows as texts; both are empty where there is no file."""
    if not path.exists():
        return [], []
    with path.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        return list(reader.fieldnames or []), [{key: value or "" for key, value in row.items() if key is not None} for row in reader]


def replace_text(path: Path, text: str) -> None:
    """Write ``text``. A reader meanwhile, or after a kill in the middle, finds the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        unfinished.write_text(text, encoding="utf-8")
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def check_file(path: Path, option: str) -> None:
    """Check that the file that ``option`` names can be written, by making and removing a folder beside it."""
    if path.exists() and not path.is_file():
        raise OptionError(f"{option} takes a file, and {path} is none; choose another name")
    try:
        folder = next(parent for parent in path.expanduser().absolute().parents if parent.exists())
        if path.exists():
            path.open("ab").close()
        with tempfile.TemporaryDirectory(dir=folder, prefix=".flysurgery."):
            pass
    except (OSError, RuntimeError) as error:  # the latter for the home of nobody
        raise OptionError(
            f"{option} cannot write {path}: {getattr(error, 'strerror', None) or first_line(error)}; choose another file"
        ) from error


class Sheet:
    """Rows with the given columns and a stamp, as texts, and in a CSV file where one is named, which is complete after each addition.

    Rows of an earlier run are kept where their device, driver, threads and all versions are those of this run. Changed sources all count
    as one commit, ``uncommitted``: after a further change to them start anew. ``fresh`` keeps no rows. ``step`` is called at each addition,
    with the number of additions, 0 for their unknown total, and a name. Raises ``OptionError`` where the file cannot be written, or holds
    something else than such rows; with ``fresh``, no measurements at all.
    """

    def __init__(self, path: Path | None, device: torch.device, columns: Iterable[str], *, fresh: bool = False) -> None:
        self.path = path
        self.device = device
        self.columns = tuple(columns)
        self.records: list[Record] = []
        self.dropped = 0
        self.step: Callable[[int, int, str], None] | None = None
        self._groups = 0
        self._index: dict[tuple[str, ...], dict[tuple[str | None, ...], list[Record]]] = {}
        if path is not None:
            check_file(path, "--out")
            self._read(path, fresh=fresh)
        self._text = as_csv(self.records)

    def _read(self, path: Path, *, fresh: bool) -> None:
        try:
            columns, found = read_table(path)
        except (ValueError, csv.Error):
            columns, found = ["no text"], []
        measurements = set(SETTING) <= set(columns)
        if columns and not (measurements if fresh else columns == [*self.columns, *STAMP]):
            what = "a table of other measurements, or of another version" if measurements else "no table of measurements"
            names = ", ".join((*columns[:8], *(["..."] if len(columns) > 8 else ())))
            raise OptionError(f"{path} is {what}, with the columns {names}; name another file with --out")
        if fresh:
            return
        stamp = take_stamp(self.device)
        setting = {name: cell(stamp[name]) for name in SETTING}
        self.records = [row for row in found if all(row[name] == value for name, value in setting.items())]
        self.dropped = len(found) - len(self.records)

    def rows(self, key: Mapping[str, object]) -> list[Record]:
        """Give the rows with these values. An index for each set of names keeps this fast for thousands of rows."""
        names = tuple(key)
        if names not in self._index:
            self._index[names] = {}
            for record in self.records:
                self._index[names].setdefault(tuple(record.get(name) for name in names), []).append(record)
        return self._index[names].get(tuple(map(cell, key.values())), [])

    def fill(self, jobs: Iterable[Job]) -> None:
        """Add the rows of each job that has none yet."""
        for key, make in jobs:
            if not self.rows(key):
                self.add(make(), ", ".join(map(str, key.values())))

    def add(self, rows: Iterable[Mapping[str, object]], what: str = "") -> list[Record]:
        """Add rows with a stamp of now, write the file, and give the rows as texts. A column that a row lacks is an empty cell.

        ``what`` names them to whoever watches.
        """
        self._groups += 1
        if self.step is not None:
            self.step(self._groups, 0, what)
        stamp = take_stamp(self.device)
        new = [{name: cell((row | stamp).get(name)) for name in (*self.columns, *STAMP)} for row in map(dict, rows)]
        if new:
            self.records += new
            self._index.clear()
            self._text += as_csv(new, header=not self._text)
            if self.path is not None:
                replace_text(self.path, self._text)
        return new
