"""The log of a run: one CSV row every few updates, the same rows to accelerate's trackers, and nothing lost by a kill."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from accelerate import Accelerator

FILE = "log.csv"


@dataclass(frozen=True)
class LogRow:
    """The state after ``update`` updates.

    Losses are means over the updates since the last row and over all processes. top1, top5 and how close the outputs are to the teacher's
    are there where the held-out images were looked at.
    """

    update: int
    epoch: float
    loss: float | None = None
    class_loss: float | None = None
    output_loss: float | None = None
    blocks_loss: float | None = None
    learning_rate: float | None = None
    images_per_second: float | None = None
    top1: float | None = None
    top5: float | None = None
    relative_error: float | None = None
    output_cosine: float | None = None
    token_cosine: float | None = None


COLUMNS = [each.name for each in fields(LogRow)]


class Log:
    """Appends rows to ``folder/log.csv``; without a folder, or on other processes than the main one, to nothing."""

    def __init__(self, folder: Path | None, accelerator: Accelerator, resumed_at: int, settings: Mapping[str, Any]) -> None:
        self._accelerator = accelerator
        self._file = folder / FILE if folder is not None and accelerator.is_main_process else None
        if accelerator.trackers or accelerator.log_with:
            plain = {name: value for name, value in settings.items() if isinstance(value, int | float | str)}
            accelerator.init_trackers("tensorboard", config=plain)
        if self._file is None:
            return
        # Rows that were written after the state was saved are written anew.
        kept = [row for row in _read(self._file) if int(row["update"]) <= resumed_at] if resumed_at else []
        with self._file.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
            writer.writeheader()
            writer.writerows(kept)

    def add(self, row: LogRow) -> None:
        """Append one row."""
        values = {name: value for name, value in asdict(row).items() if value is not None}
        if self._accelerator.trackers:
            self._accelerator.log({name: value for name, value in values.items() if name != "update"}, step=row.update)
        if self._file is not None:
            with self._file.open("a", newline="", encoding="utf-8") as file:
                csv.DictWriter(file, COLUMNS, lineterminator="\n").writerow(values)

    def close(self) -> None:
        """Let the trackers write what they hold back."""
        for tracker in self._accelerator.trackers:
            tracker.finish()


def _read(file: Path) -> list[dict[str, str]]:
    if not file.is_file():
        return []
    with file.open(newline="", encoding="utf-8") as lines:
        return list(csv.DictReader(lines))
