"""One run of measurements: what is there already, what is added, and how far it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

import torch
import typer

from flysurgery.bench import Record, Sheet, check_apart, check_plot, typed
from flysurgery.cli.progress import progress
from flysurgery.cli.tables import print_json

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


class BenchRun:
    """Rows of the class ``kind``, of this run and of the interrupted one before it; progress on stderr where it is a terminal.

    Raises:
        OptionError: ``--plot`` cannot be drawn, or ``--out`` cannot be written or names a file that holds something else, or both name
            one file.
    """

    def __init__(
        self, device: torch.device, kind: type[DataclassInstance], out: Path | None, *, fresh: bool = False, plot: Path | None = None
    ) -> None:
        check_apart({"--out": out, "--plot": plot})
        check_plot(plot)
        self._sheet = Sheet(out, device, kind, fresh=fresh)
        if self._sheet.dropped:
            typer.echo(f"{out}: {self._sheet.dropped} rows of another device or version are measured anew", err=True)
        if self._sheet.records:
            typer.echo(f"{out}: {len(self._sheet.records)} rows are there already and stay; --fresh measures them again", err=True)
        self._stack = ExitStack()
        self._groups = 0

    def __enter__(self) -> BenchRun:
        self._step = self._stack.enter_context(progress("measuring"))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stack.__exit__(kind, error, trace)

    @property
    def records(self) -> list[Record]:
        """All rows so far, as texts."""
        return self._sheet.records

    def has(self, key: Mapping[str, object]) -> bool:
        """Whether rows with these values are there already."""
        return self._sheet.has(key)

    def rows(self, key: Mapping[str, object]) -> list[Record]:
        """The rows with these values."""
        return self._sheet.rows(key)

    def add(self, rows: Sequence[DataclassInstance], what: str) -> list[Record]:
        """Keep rows; ``what`` names them to whoever watches."""
        self._groups += 1
        if self._step is not None:
            self._step(self._groups, 0, what)
        return self._sheet.add(rows)

    def print_json(self) -> None:
        """Print all rows as one JSON document, with the stamp of the last."""
        print_json(typed(self.records))
