"""The table of autotuned configurations: the shipped one, and the user's own, which comes first; and a record of what to autotune."""

import functools
import json
import math
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from flysurgery.errors import PatternError
from flysurgery.gpu.cache_folder import cache_folder, warn_unwritable
from flysurgery.gpu.uncounted_writes import doubt
from flysurgery.patterns import Architecture

SCHEMA = 1
Chosen = TypeVar("Chosen")
Given = ParamSpec("Given")
_CHOICES: list[Callable[[], None]] = []
_SHIPPED = Path(__file__).parent / "tuned"


@dataclass(frozen=True)
class TunedCase:
    """What was timed: one kernel source on one kind of device, for one architecture, mode and number of rows."""

    device: str
    kernel: str
    architecture: Architecture
    mode: str
    linears: int
    rows: int


@dataclass(frozen=True)
class TunedEntry:
    """The fastest configuration of a case, as plain values, and its time."""

    case: TunedCase
    config: dict[str, Any]
    median_us: float

    def to_json(self) -> dict[str, Any]:
        """One line of a table."""
        return {**asdict(self.case), "architecture": self.case.architecture.to_json(), "config": self.config, "median_us": self.median_us}

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> "TunedEntry":
        """The inverse of ``to_json``. Raises KeyError, TypeError, ValueError or PatternError on anything else."""
        case = TunedCase(
            device=str(fields["device"]),
            kernel=str(fields["kernel"]),
            architecture=Architecture.from_json(fields["architecture"]),
            mode=str(fields["mode"]),
            linears=int(fields["linears"]),
            rows=int(fields["rows"]),
        )
        if case.rows < 1:
            raise ValueError(f"expected at least one row, got {case.rows}")
        return cls(case, dict(fields["config"]), float(fields["median_us"]))


def chosen_by_table(choose: Callable[Given, Chosen]) -> Callable[Given, Chosen]:
    """Remember what a function chooses by the table, until the table changes. Its arguments are hashable."""
    remembered = functools.lru_cache(maxsize=4096)(choose)
    _CHOICES.append(remembered.cache_clear)
    return remembered  # pyright: ignore[reportReturnType] - its annotation takes any arguments


def rows_bucket(rows: int) -> int:
    """Rows in steps of a quarter of a power of two: within one, the choice of a configuration is the same."""
    if rows <= 4:
        return rows
    step = 1 << (rows.bit_length() - 3)
    return -(-rows // step) * step


def tuned_config(kernel: str, architecture: Architecture, mode: str, linears: int, device_index: int, rows: int) -> dict[str, Any] | None:
    """The configuration of the entry with the nearest number of rows, by their ratio; None where nothing was tuned."""
    entries = _by_case().get(TunedCase(torch.cuda.get_device_name(device_index), kernel, architecture, mode, linears, 0))
    if not entries:
        return None
    return min(entries.values(), key=lambda entry: abs(math.log(entry.case.rows / max(rows, 1)))).config


def save_entries(entries: Iterable[TunedEntry]) -> Path:
    """Add entries to the user's table, in place of older ones of the same case; gives the file.

    The file is written under another name and renamed. A folder that cannot be written costs one warning.
    """
    path = user_table()
    merged = {entry.case: entry for entry in (*_read(path), *entries)}
    text = json.dumps({"schema": SCHEMA, "entries": [entry.to_json() for entry in merged.values()]}, indent=1)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        Path(name).replace(path)
    except OSError as error:
        warn_unwritable("autotuned configurations", path.parent, error)
    forget_choices()
    return path


def forget_choices() -> None:
    """Read the tables again, and choose again, at the next call."""
    for forget in (_by_case.cache_clear, *_CHOICES):
        forget()


def user_table() -> Path:
    """The file that ``save_entries`` writes."""
    return cache_folder() / "autotune.json"


@functools.cache
def _by_case() -> dict[TunedCase, dict[int, TunedEntry]]:
    """By the case of no rows, and then by the number of rows."""
    found: dict[TunedCase, dict[int, TunedEntry]] = {}
    for path in (*sorted(_SHIPPED.glob("*.json")), user_table()):
        for entry in _read(path):
            found.setdefault(replace(entry.case, rows=0), {})[entry.case.rows] = entry
    return found


def _read(path: Path) -> list[TunedEntry]:
    """Entries of a table; none from one that is missing, damaged or of another schema, which autotuning replaces."""
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
        return [TunedEntry.from_json(fields) for fields in table["entries"]] if table["schema"] == SCHEMA else []
    except (OSError, ValueError, KeyError, TypeError, PatternError):
        return []


_met: dict[TunedCase, int] | None = None


def meet(cases: Callable[[int], list[TunedCase]], x: Tensor) -> None:
    """Record what there is to autotune for so many rows as x has, if a recording is active."""
    if _met is not None and x.numel():
        _met.update(dict.fromkeys(cases(x.numel() // x.shape[-1]), x.device.index))


@contextmanager
def cases_met() -> Iterator[dict[TunedCase, int]]:
    """Record the cases of the kernels that all threads run inside the block, in order, and their devices."""
    global _met
    _met = {}
    doubt()  # a repeated call would record nothing
    try:
        yield _met
    finally:
        _met = None
