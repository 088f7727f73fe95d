"""What a verb shows: on stdout a table or one JSON document, on stderr its progress and what it left out."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager

import typer

from flysurgery.calibration import Samples
from flysurgery.cli.processes import is_first
from flysurgery.evaluation import Accuracy
from flysurgery.surgery import text_table


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, right: Collection[str] = ()) -> None:
    """Print rows under their column titles; the columns named in ``right`` are set to the right.

    A line feed in a title or cell is a place where the text may be broken: a terminal that is too narrow for the
    whole row breaks there, and everything else sees a space. Output that goes elsewhere is one line a row and
    depends on nothing but the rows, so that it can be compared and cut.
    """
    whole = [[cell.replace("\n", " ") for cell in row] for row in (columns, *rows)]
    if not sys.stdout.isatty():
        typer.echo(text_table(whole[0], whole[1:], right=[name.replace("\n", " ") for name in right]))
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    width = sum(max(map(len, cells)) + 1 for cells in zip(*whole, strict=True)) - 1
    lines = whole if width <= console.width else (columns, *rows)
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 1), collapse_padding=True)
    for index, name in enumerate(columns):
        table.add_column(lines[0][index], justify="right" if name in right else "left", overflow="fold", no_wrap=index == 0)
    for row in lines[1:]:
        table.add_row(*(Text(cell) for cell in row))
    console.print(table)


def print_changes(what: str, rows: Sequence[Sequence[str]]) -> None:
    """Print rows of something before and after, and the change."""
    print_table((what, "before", "after", "change"), rows, right=("before", "after", "change"))


def accuracy_rows(before: Accuracy, after: Accuracy) -> list[tuple[str, ...]]:
    """Rows for ``print_changes``."""
    return [
        (f"{name} accuracy, {after.samples} samples", f"{first:.2%}", f"{second:.2%}", f"{100 * (second - first):+.2f} points")
        for name, first, second in (("top-1", before.top1, after.top1), ("top-5", before.top5, after.top5))
    ]


def print_json(document: Mapping[str, object]) -> None:
    """Print the one JSON document of a verb."""
    typer.echo(json.dumps(document, indent=2, allow_nan=False))


@contextmanager
def progress(what: str) -> Iterator[Callable[[int, int, str], None] | None]:
    """Give a callback ``(done, total, name)`` that draws a bar on stderr, or None where nobody would see it."""
    if not sys.stderr.isatty() or not is_first():
        yield None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total, name: bar.update(task, completed=done, total=total, description=f"{what} {name}")


def tell_skipped(found: Samples) -> Samples:
    """Say on stderr which images were left out, where there are any."""
    if found.skipped and is_first():
        named = ", ".join(found.skipped[:5]) + (", ..." if len(found.skipped) > 5 else "")
        typer.echo(f"flysurgery: {len(found.skipped)} images in {found.name} cannot be read and are left out: {named}", err=True)
    return found
