"""Plans and reports as plain text, one line for each group of layers that are alike."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TypeVar

Item = TypeVar("Item")


def text_table(header: Sequence[str], rows: Sequence[Sequence[str]], *, right: Collection[str] = ()) -> str:
    """Columns as wide as their widest cell; those named in ``right`` are set to the right."""
    lines = [tuple(header), *map(tuple, rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if title in right else cell.ljust(width) for title, cell, width in zip(header, line, widths, strict=True)
        ).rstrip()
        for line in lines
    )


def grouped(items: Iterable[Item], name: Callable[[Item], str], alike: Callable[[Item], object]) -> list[tuple[str, list[Item]]]:
    """Group the items whose names differ in numbers only and that are ``alike``; in order of their first appearance.

    The group's name shows ``*`` where its members' names differ: ``blocks.*.mlp.fc1``.
    """
    groups: dict[object, list[Item]] = {}
    for item in items:
        groups.setdefault((re.sub(r"\d+", "*", name(item)), alike(item)), []).append(item)
    return [(_shared_name([name(item) for item in members]), members) for members in groups.values()]


def _shared_name(names: Sequence[str]) -> str:
    columns = zip(*(re.split(r"(\d+)", name) for name in names), strict=True)
    return "".join(column[0] if len(set(column)) == 1 else "*" for column in columns)


def short_count(count: int) -> str:
    """A large number in three digits: ``21.4 M``."""
    for unit, scale in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= scale:
            return f"{count / scale:.3g} {unit}"
    return str(count)


def share(after: int, before: int) -> str:
    """``after`` in percent of ``before``."""
    return f"{after / before:.1%}" if before else "-"
