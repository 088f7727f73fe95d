"""The rows of the table on real weights: kept in a file, summed up over seeds, and drawn."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean, median
from typing import TYPE_CHECKING, Any

import torch
from weight_rivals import COMPILED, RIVALS
from weight_ways import DENSE, STEPS

from flysurgery.bench import Record, Stamp, check_file, flat, take_stamp, write_records
from flysurgery.bench.rows import cell, columns_of, read_table
from flysurgery.cli.tables import print_table
from flysurgery.errors import OptionError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

MEASURES = ("cls", "patch", "relative_error", "iou", "correlation", "nearest")
COLUMNS = ("params", "seconds", "ms", "dense_optimized_ms", "dense_ms", *MEASURES)
KEY = ("way", "minutes", "photographs", "crops", "judging", "device")
"""Rows that agree in these differ in their seeds alone."""

MARKS = dict(zip(STEPS, "xos^v", strict=True))
RIVAL_MARKS = dict(zip(RIVALS, "xPX", strict=True))


class Rows:
    """Rows of the class ``kind`` as texts, in a CSV file where one is named, which is whole after each row.

    Rows of any commit stay. One that failed is left out when the file is read, and so made again.

    Raises:
        OptionError: the file cannot be written, or holds something else.
    """

    def __init__(self, path: Path | None, device: torch.device, kind: type[DataclassInstance], *, fresh: bool = False) -> None:
        self._path, self._device = path, device
        self._name = cell(take_stamp(device).device)
        self.records: list[Record] = []
        if path is None:
            return
        check_file(path, "--out")
        try:
            columns, found = read_table(path)
        except (ValueError, csv.Error):
            columns, found = ["no text"], []
        if columns and columns != [*columns_of(kind), *columns_of(Stamp)]:
            raise OptionError(f"{path} is no table of measurements of this recipe; name another file with --out")
        self.records = [] if fresh else [record for record in found if record["status"] == "ok"]

    def has(self, key: Mapping[str, object]) -> bool:
        """Whether there is a row with these values, of this device."""
        wanted = {name: cell(value) for name, value in key.items()} | {"device": self._name}
        return any(all(record[name] == value for name, value in wanted.items()) for record in self.records)

    def add(self, row: DataclassInstance) -> None:
        """Keep a row, with a stamp of now."""
        self.records.append({name: cell(value) for name, value in (flat(row) | flat(take_stamp(self._device))).items()})
        if self._path is not None:
            write_records(self._path, self.records)


def summary(records: Sequence[Record]) -> list[dict[str, Any]]:
    """One entry for the rows that differ in their seeds alone: means, ``seeds``, and how far ``cls`` spreads from the least to the most."""
    groups: dict[tuple[str, ...], list[Record]] = {}
    for record in records:
        if record["status"] == "ok":
            groups.setdefault(tuple(record[name] for name in KEY), []).append(record)
    entries = []
    for found in groups.values():
        entry: dict[str, Any] = {name: found[0][name] for name in ("way", "family", "step", "minutes", "device")}
        for name in COLUMNS:
            values = [float(record[name]) for record in found if record[name]]
            entry[name] = mean(values) if values else None
        spread = [float(record["cls"]) for record in found]
        entries.append(entry | {"seeds": len(found), "cls_least": min(spread), "cls_most": max(spread)})
    return entries


def show(records: Sequence[Record]) -> None:
    """Print the means over seeds, and what failed."""
    titles = ["way", "min", "seeds", "params M", "seconds", "ms", "dense opt.", "dense", "CLS", "spread", *MEASURES[1:]]
    lines = []
    for each in summary(records):
        numbers = [_short(each[name], 2) for name in ("ms", "dense_optimized_ms", "dense_ms")]
        spread = _short(each["cls_most"] - each["cls_least"], 3) if each["seeds"] > 1 else ""
        seen = [_short(each[name], 3) for name in MEASURES]
        head = [each["way"], each["minutes"], str(each["seeds"]), _short(each["params"] / 1e6, 2), _short(each["seconds"], 0)]
        lines.append([*head, *numbers, seen[0], spread, *seen[1:]])
    print_table([title.replace("_", " ") for title in titles], lines, right=[title.replace("_", " ") for title in titles[1:]])
    for record in records:
        if record["status"] != "ok":
            print(f"{record['way']}, seed {record['seed']}: {record['status']}")


def _short(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def draw(records: Sequence[Record], plot: Path) -> None:
    """CLS cosine over milliseconds, where there are any, and over parameters: a colour and line for each family, a mark for each step.

    A rival is a mark by itself. One that lies below all families stands at the lower edge, with its cosine written beside it.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    entries = summary(records)
    timed = any(each["ms"] is not None for each in entries)
    panels = [("ms", "ms, 128 images, fp16")] * timed + [("params", "parameters of the backbone, millions")]
    figure, grid = pyplot.subplots(1, len(panels), figsize=(6.5 * len(panels), 5), layout="constrained", squeeze=False)
    fitted = [each for each in entries if each["family"] not in (DENSE, *RIVALS)]
    for axes, (column, label) in zip(grid[0], panels, strict=True):
        axes.set(xlabel=label, ylabel="cosine of the class token with the dense model's")
        _draw_families(axes, fitted, column)
        bottom = axes.get_ylim()[0] if fitted else 0.0
        _draw_dense(axes, entries, column)
        _draw_rivals(axes, [each for each in entries if each["family"] in RIVALS], column, bottom)
        axes.set(xlim=(0, None), ylim=(bottom, 1 + 0.05 * (1 - bottom)))
        axes.grid(alpha=0.3)
    for step in dict.fromkeys(each["step"] for each in entries if each["step"]):
        grid[0][-1].plot([], [], "k", linestyle="none", marker=MARKS.get(step, "o"), label=step)
    for axes in grid[0]:
        axes.legend(fontsize=7)
    figure.suptitle(", ".join(dict.fromkeys(each["device"] for each in entries)), fontsize=9)
    plot.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(plot, dpi=150)
    pyplot.close(figure)


def _across(each: Mapping[str, Any], column: str) -> float:
    return each[column] / (1e6 if column == "params" else 1)


def _draw_families(axes: Any, entries: Sequence[Mapping[str, Any]], column: str) -> None:
    for number, family in enumerate(dict.fromkeys(each["family"] for each in entries)):
        own = sorted((each for each in entries if each["family"] == family and each[column] is not None), key=lambda each: each["cls"])
        colour = f"C{number}"
        axes.plot([_across(each, column) for each in own], [each["cls"] for each in own], color=colour, linewidth=0.8, label=family)
        for each in own:
            spread = [[each["cls"] - each["cls_least"]], [each["cls_most"] - each["cls"]]]
            axes.errorbar([_across(each, column)], [each["cls"]], spread, color=colour, marker=MARKS.get(each["step"], "o"), markersize=5)


def _draw_dense(axes: Any, entries: Sequence[Mapping[str, Any]], column: str) -> None:
    """As it is and optimized, which each row has beside it; its parameters are in the row of its own."""
    names = {"dense_optimized_ms": ("dense, optimized", "k*"), "dense_ms": ("dense", "k+")} if column == "ms" else {column: (DENSE, "k*")}
    for name, (label, mark) in names.items():
        found = [_across(each, name) for each in entries if each[name] is not None and (column == "ms" or each["family"] == DENSE)]
        if found:
            axes.plot([median(found)], [1], mark, markersize=9, linestyle="none", label=label)


def _draw_rivals(axes: Any, entries: Sequence[Mapping[str, Any]], column: str, bottom: float) -> None:
    for each in entries:
        if each[column] is None or (column == "params" and each["family"] == COMPILED):
            continue
        place, height = _across(each, column), max(each["cls"], bottom)
        mark = RIVAL_MARKS[each["family"]]
        style = {"color": "k", "markerfacecolor": "none", "markersize": 10, "linestyle": "none", "clip_on": False}
        axes.plot([place], [height], marker=mark, label=each["family"], **style)
        if height > each["cls"]:
            axes.annotate(f"{each['cls']:.2f}", (place, height), (7, 5), textcoords="offset points", fontsize=8)
