"""One run of measurements: the rows that are there already and those that are added, and how they are shown."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import typer

from flysurgery.bench import Protocol, Sheet
from flysurgery.cli import options
from flysurgery.cli.tables import progress
from flysurgery.tables import text_table

TITLES = {
    "peak_gib": "peak GiB",
    "weights_gib": "weights GiB",
    "median_ms": "median ms",
    "iqr_ms": "iqr ms",
    "ratio_to_dense": "/ dense",
    "paper_ratio": "paper",
    "share_of_bound": "of bound",
}
FORMATS = {
    "peak_gib": ".3f",
    "weights_gib": ".4f",
    "median_ms": ".3f",
    "iqr_ms": ".3f",
    "bound_ms": ".3f",
    "ratio_to_dense": ".2f",
    "share_of_bound": ".0%",
    "error": ".1e",
}


def prepare(device: str | None, threads: int | None) -> torch.device:
    """The device that is meant, after the number of threads has been set."""
    target = options.device_of(device)
    if threads is not None:
        torch.set_num_threads(threads)
    return target


def protocol_of(launch: str, rounds: int | None, seed: int, *, quick: bool, seconds: tuple[float, float]) -> Protocol:
    """How each candidate is timed; ``seconds`` are its most in a quick run and in a whole one."""
    return Protocol(launch, rounds or (7 if quick else 30), seconds[0] if quick else seconds[1], seed)


@contextmanager
def bench_run(device: torch.device, columns: Iterable[str], out: Path | None, *, fresh: bool = False) -> Iterator[Sheet]:
    """Rows with the given columns, of this run and of the interrupted one before it; progress on stderr where it is a terminal.

    Raises:
        OptionError: ``--out`` cannot be written or names a file that holds something else.
    """
    run = Sheet(out, device, columns, fresh=fresh)
    if run.dropped:
        typer.echo(f"{out}: {run.dropped} rows of another device or version are measured anew", err=True)
    if run.records:
        typer.echo(f"{out}: {len(run.records)} rows are there already and stay; --fresh measures them again", err=True)
    with progress("measuring") as run.step:
        yield run


def record_table(records: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> str:
    """Some columns of the records; numbers short, and to the right.

    Left out are memory where no row has it and, for a CPU, the share of the bound, since inputs that lie in its caches are not bounded by
    the rate of its memory.
    """
    absent = {name for name in ("peak_gib", "weights_gib") if not any(record.get(name) for record in records)}
    if all(record.get("device_type") == "cpu" for record in records):
        absent.add("share_of_bound")
    columns = [name for name in columns if name not in absent]
    titles = [TITLES.get(name, name.replace("_", " ")) for name in columns]
    numbers = {
        title for name, title in zip(columns, titles, strict=True) if name in FORMATS or all(_is_number(each[name]) for each in records)
    }
    return text_table(titles, [[_short(name, record[name]) for name in columns] for record in records], right=numbers)


def _short(name: str, text: Any) -> str:
    if text in ("", None):
        return ""
    return format(float(text), FORMATS[name]) if name in FORMATS else str(text)


def _is_number(text: Any) -> bool:
    try:
        float(text or 0)
    except (TypeError, ValueError):
        return False
    return True
