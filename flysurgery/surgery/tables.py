"""Text tables of layers, one line for each group of layers that are alike."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

Item = TypeVar("Item")

Columns: TypeAlias = Mapping[str, Callable[[list[Any]], str | None]]
"""The cell of each column for layers that are alike, by title."""

LEFT = ("role", "out x in", "family", "architecture", "reason", "note")
"""The columns of texts; numbers are set to the right."""


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


def layer_table(title: str, layers: Iterable[Any], alike: Callable[[Any], object], columns: Columns) -> str:
    """One line for each group of layers that are ``alike``: its name, its size, and ``columns``. No layers give no table."""
    rows = [
        (name, str(len(members)), *(cell(members) or "" for cell in columns.values()))
        for name, members in grouped(layers, lambda layer: layer.fqn, alike)
    ]
    right = [column for column in ("layers", *columns) if column not in LEFT]
    return text_table((title, "layers", *columns), rows, right=right) if rows else ""


def replaced_table(title: str, layers: Iterable[Any], counted: str, further: Columns) -> str:
    """The layers that are replaced, rows of a plan or of a report; ``counted`` is "weights" or "params"."""
    columns: Columns = {
        "role": lambda layers: layers[0].role,
        "out x in": lambda layers: layers[0].size,
        counted: lambda layers: short_count(total(layers, f"{counted}_before")),
        "after": lambda layers: short_count(total(layers, f"{counted}_after")),
        "share": lambda layers: share(total(layers, f"{counted}_after"), total(layers, f"{counted}_before")),
        **further,
        "family": lambda layers: layers[0].family,
        "architecture": lambda layers: layers[0].architecture,
    }
    return layer_table(title, layers, lambda layer: (layer.role, layer.size, layer.architecture), columns)


def kept_table(layers: Iterable[Any]) -> str:
    """The layers that stay dense, and why; rows of a plan or of a report."""
    columns: Columns = {
        "role": lambda layers: layers[0].role,
        "out x in": lambda layers: layers[0].size,
        "reason": lambda layers: layers[0].reason and f"{layers[0].reason.code}: {layers[0].reason.text}",
    }
    kept = [layer for layer in layers if layer.status == "keep"]
    return layer_table("keep dense", kept, lambda layer: (layer.role, layer.size, layer.reason), columns)


def blocks_of_text(*blocks: object) -> str:
    """The blocks with an empty line between them; those that are None or empty are left out."""
    return "\n\n".join(str(block) for block in blocks if block)


def total(layers: Iterable[Any], name: str) -> int:
    """The sum of one property of the layers."""
    return sum(getattr(layer, name) for layer in layers)


def change(before: int, after: int) -> str:
    """Two large numbers and the share that is left: ``21.4 M -> 8.2 M (38.3%)``."""
    return f"{short_count(before)} -> {short_count(after)} ({share(after, before)})"


def short_count(count: int) -> str:
    """A large number in three digits: ``21.4 M``."""
    for unit, scale in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= scale:
            return f"{count / scale:.3g} {unit}"
    return str(count)


def share(after: int, before: int) -> str:
    """``after`` in percent of ``before``."""
    return f"{after / before:.1%}" if before else "-"


def _shared_name(names: Sequence[str]) -> str:
    columns = zip(*(re.split(r"(\d+)", name) for name in names), strict=True)
    return "".join(column[0] if len(set(column)) == 1 else "*" for column in columns)
