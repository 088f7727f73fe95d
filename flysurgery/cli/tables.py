"""Results on stdout: a rich table on a terminal, plain aligned columns elsewhere, one JSON document on request."""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Mapping, Sequence

import typer

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


def print_json(document: Mapping[str, object]) -> None:
    """Print the one JSON document of a verb."""
    typer.echo(json.dumps(document, indent=2, allow_nan=False))
