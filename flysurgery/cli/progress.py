"""Progress on stderr, of one process, and only where stderr is a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from flysurgery.cli.processes import is_first


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
