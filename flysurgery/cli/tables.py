"""What a verb shows: on stdout a table or one JSON document, on stderr its progress and what it left out."""

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import typer

from flysurgery.calibration import Samples
from flysurgery.cli.processes import is_first
from flysurgery.evaluation import Accuracy


def accuracy_rows(before: Accuracy, after: Accuracy) -> list[tuple[str, ...]]:
    """Rows for ``changes_table``."""
    return [
        (f"{name} accuracy, {after.samples} samples", f"{first:.2%}", f"{second:.2%}", f"{100 * (second - first):+.2f} points")
        for name, first, second in (("top-1", before.top1, after.top1), ("top-5", before.top5, after.top5))
    ]


def show(document: Mapping[str, object], text: str, *, as_json: bool) -> None:
    """Print what a verb has found: as the one JSON document, or as text."""
    typer.echo(json.dumps(document, indent=2, allow_nan=False) if as_json else text)


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
