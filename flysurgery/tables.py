"""Text tables of layers, one line for each group of layers that are alike."""

import re
import shutil
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import zip_longest
from operator import attrgetter
from textwrap import fill, wrap
from typing import Any, TypeAlias, TypeVar

Item = TypeVar("Item")

Columns: TypeAlias = Mapping[str, Callable[[list[Any]], str | None]]
"""The cell of each column for layers that are alike, by title."""

_TEXTS = ("role", "out x in", "family", "architecture", "why", "note", "obstacles")
"""The columns of texts; numbers are set to the right."""

_NO_BREAK = "\N{NO-BREAK SPACE}"
"""In a cell: a space at which a line is not broken, and which is printed as any other."""


def text_table(header: Sequence[str], rows: Sequence[Sequence[str]], *, right: Collection[str] = ()) -> str:
    """Rows under their column titles; the columns named in ``right`` are set to the right.

    Lines are as long as the terminal is wide, or as ``COLUMNS`` says; 80 where neither is known. Cells of a table that is wider are broken
    between words, which spaces separate, and no-break spaces do not. Where not even words fit beside each other, each row becomes a
    paragraph. Nothing is left out.
    """
    terminal = shutil.get_terminal_size((80, 24)).columns
    gap, widths = 2, _widths([header, *rows], terminal, 2)
    if widths is None:
        gap, widths = 1, _widths([header, *rows], terminal, 1)
    if widths is None:
        return "\n".join(_paragraph(header, row, terminal) for row in rows).replace(_NO_BREAK, " ")
    texts = []
    for line in (header, *rows):
        cells = [wrap(cell, width, break_long_words=False, break_on_hyphens=False) for cell, width in zip(line, widths, strict=True)]
        for parts in zip_longest(*cells, fillvalue=""):
            aligned = zip(parts, widths, header, strict=True)
            placed = [text.rjust(width) if name in right else text.ljust(width) for text, width, name in aligned]
            texts.append((gap * " ").join(placed).rstrip())
    return "\n".join(texts).replace(_NO_BREAK, " ")


def _widths(lines: Sequence[Sequence[str]], most: int, gap: int) -> list[int] | None:
    """The columns' widths, so that a line has at most ``most`` characters; None if the longest words of all columns do not fit."""
    columns = list(zip(*lines, strict=True))
    widths = [max(1, *map(len, cells)) for cells in columns]
    least = [max(1, *(len(word) for cell in cells for word in cell.split(" "))) for cells in columns]
    while sum(widths) + gap * (len(widths) - 1) > most:
        breakable = [index for index, width in enumerate(widths) if width > least[index]]
        if not breakable:
            return None
        widths[max(breakable, key=widths.__getitem__)] -= 1
    return widths


def _paragraph(header: Sequence[str], row: Sequence[str], width: int) -> str:
    """The row's first cell, and below it the others behind their titles."""
    others = "; ".join(f"{name}: {cell}" for name, cell in zip(header[1:], row[1:], strict=True) if cell)
    return "\n".join([fill(row[0], width), fill(others, width, initial_indent="    ", subsequent_indent="    ", break_on_hyphens=False)])


def grouped(items: Iterable[Item], name: Callable[[Item], str], alike: Callable[[Item], object]) -> list[tuple[str, list[Item]]]:
    """Group the items whose names differ in numbers only and that are ``alike``; in order of their first appearance.

    The group's name shows ``*`` where its members' names differ: ``blocks.*.mlp.fc1``.
    """
    groups: dict[object, list[Item]] = {}
    for item in items:
        groups.setdefault((re.sub(r"\d+", "*", name(item)), alike(item)), []).append(item)
    return [(_shared_name([name(item) for item in members]), members) for members in groups.values()]


def layer_table(
    title: str, layers: Iterable[Any], alike: Callable[[Any], object], columns: Columns, name: Callable[[Any], str] = attrgetter("fqn")
) -> str:
    """One line for each group of layers that are ``alike``: its name, its size, and ``columns``. No layers give no table."""
    rows = [
        (shared, str(len(members)), *(cell(members) or "" for cell in columns.values())) for shared, members in grouped(layers, name, alike)
    ]
    right = [column for column in ("n", *columns) if column not in _TEXTS]
    return text_table((title, "n", *columns), rows, right=right) if rows else ""


def replaced_table(title: str, layers: Iterable[Any], further: Columns) -> str:
    """The layers that are replaced, rows of a plan or of a report."""
    columns: Columns = {
        "role": lambda layers: layers[0].role,
        **further,
        "params": lambda layers: _change(layers, "params"),
        "FLOPs": lambda layers: _change(layers, "flops"),
        "family": lambda layers: layers[0].family,
        "architecture": lambda layers: layers[0].architecture.replace("),(", "), ("),
    }
    replaced = [layer for layer in layers if layer.status == "replace"]
    return layer_table(title, replaced, lambda layer: (layer.role, layer.size, layer.architecture), columns)


def kept_table(layers: Iterable[Any]) -> str:
    """The layers that stay dense, and why; rows of a plan or of a report."""
    columns: Columns = {
        "role": lambda layers: layers[0].role,
        "out x in": lambda layers: layers[0].size,
        "why": lambda layers: layers[0].reason and f"{layers[0].reason.code}: {layers[0].reason.text}",
    }
    kept = [layer for layer in layers if layer.status == "keep"]
    return layer_table("kept dense", kept, lambda layer: (layer.role, layer.size, layer.reason), columns)


def changes_table(what: str, rows: Sequence[Sequence[str]]) -> str:
    """Rows of something before and after, and the change."""
    return text_table((what, "before", "after", "change"), rows, right=("before", "after", "change")) if rows else ""


def layer_totals(layers: Sequence[Any]) -> list[tuple[str, ...]]:
    """Rows for ``changes_table`` on the layers of a plan or of a report. FLOPs are those of one sample's forward."""
    replaced = [layer for layer in layers if layer.status == "replace"]
    return [
        count_row("parameters of the replaced layers", total(replaced, "params_before"), total(replaced, "params_after")),
        count_row("FLOPs of all linear layers", total(layers, "flops_before"), total(layers, "flops_after")),
    ]


def count_row(what: str, before: int, after: int) -> tuple[str, ...]:
    """A row for ``changes_table`` with large numbers."""
    return (what, short_count(before), short_count(after), f"{after / before - 1:+.1%}" if before else "")


def blocks_of_text(*blocks: object) -> str:
    """The blocks with an empty line between them; those that are None or empty are left out."""
    return "\n\n".join(str(block) for block in blocks if block)


def total(layers: Iterable[Any], name: str) -> int:
    """The sum of one property of the layers."""
    return sum(getattr(layer, name) for layer in layers)


def short_count(count: int) -> str:
    """A large number in three digits: ``21.4 M``."""
    for unit, scale in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= scale:
            return f"{count / scale:.3g} {unit}"
    return str(count)


def _change(layers: Iterable[Any], name: str) -> str:
    counts = (total(layers, f"{name}_{when}") for when in ("before", "after"))
    return " -> ".join(short_count(count).replace(" ", _NO_BREAK) for count in counts)


def _shared_name(names: Sequence[str]) -> str:
    columns = zip(*(re.split(r"(\d+)", name) for name in names), strict=True)
    return "".join(column[0] if len(set(column)) == 1 else "*" for column in columns)
