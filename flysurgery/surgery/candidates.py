"""The architectures that an allocation chooses from: those with names, or those of a table with the times of layers."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from flysurgery.errors import DataError, PatternError
from flysurgery.patterns import Architecture, gonon, low_rank, monarch
from flysurgery.surgery.choices import TimedChoice, TimedGroup
from flysurgery.surgery.plan import LayerPlan

NBLOCKS = (2, 4, 8, 16)

COLUMNS = ("fqn", "architecture", "ms")


def named_candidates(out_features: int, in_features: int) -> dict[str, Architecture]:
    """Monarch of 2, 4, 8 and 16 blocks and gonon where they fit, then low rank with at most as many weights as each; all below dense.

    The names say what is alike in matrices of different sizes, such as "monarch 4" and "low rank as monarch 4".
    """
    found: dict[str, Architecture] = {}

    def add(name: str, make: Callable[..., Architecture], *options: int) -> None:
        try:
            architecture = make(out_features, in_features, *options)
        except PatternError:
            return
        if architecture.density < 1:
            found[name] = architecture

    for nblocks in NBLOCKS:
        add(f"monarch {nblocks}", monarch, nblocks)
    add("gonon", gonon)
    if not found:  # a matrix whose sides have no common divisor can still be of low rank
        add("low rank", low_rank)
    for name, architecture in tuple(found.items()):
        rank = architecture.num_parameters // (out_features + in_features)
        if rank and name != "low rank":
            add(f"low rank as {name}", low_rank, rank)
    return found


def candidates(layer: LayerPlan) -> tuple[Architecture, ...]:
    """What ``layer`` may get: architectures of its whole matrix, or of each of its parts; none where its parts differ in size."""
    sizes = {part.stop - part.start for part in layer.parts} or {layer.out_features}
    return tuple(dict.fromkeys(named_candidates(sizes.pop(), layer.in_features).values())) if len(sizes) == 1 else ()


def read_latency_table(file: Path, layers: Sequence[LayerPlan]) -> list[TimedGroup]:
    """The times of ``layers``, each a group by itself; rows of other layers and further columns are ignored.

    ``file`` is CSV with a header line, or JSON: a list of rows, or an object with such a list as "rows". Architectures that are among the
    candidates have their names.

    Raises:
        DataError: the file cannot be read; a row is wrong or stands twice (the message has its line, in JSON its number); or a layer
            has no rows, or none for dense.
    """
    try:
        text = file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"the latency table {file} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    rows = _json_rows(text, file) if text.lstrip()[:1] in ("{", "[") else _csv_rows(text, file)
    known = {layer.fqn: layer for layer in layers}
    times: dict[str, dict[Architecture | None, float]] = {layer.fqn: {} for layer in layers}
    for where, row in rows:
        missing = [name for name in COLUMNS if not isinstance(row, Mapping) or name not in row]
        if missing:
            raise DataError(f"{where}: expected a row with {', '.join(COLUMNS)}, and {', '.join(missing)} is missing; got {str(row)[:80]}")
        layer = known.get(str(row.get("fqn")).strip())
        if layer is None:
            continue
        architecture, ms = _architecture(row, layer, where), _ms(row, where)
        if architecture in times[layer.fqn]:
            raise DataError(f"{where}: a second row of layer {layer.fqn} with {architecture or 'dense'}; keep one of them")
        times[layer.fqn][architecture] = ms
    return [_group(layer, times[layer.fqn], file) for layer in layers]


def _group(layer: LayerPlan, times: dict[Architecture | None, float], file: Path) -> TimedGroup:
    if None not in times:
        what = "has no rows of" if not times else "has no dense row of"
        raise DataError(f"the latency table {file} {what} layer {layer.fqn}; time it with flysurgery bench model, or exclude the layer")
    sizes = {part.stop - part.start for part in layer.parts}
    names = {architecture: name for size in sizes for name, architecture in named_candidates(size, layer.in_features).items()}
    choices = [TimedChoice(names.get(each, str(each)), (each,), ms) for each, ms in times.items() if each is not None]
    return TimedGroup((layer.fqn,), (TimedChoice("dense", (None,), times[None]), *choices))


def _csv_rows(text: str, file: Path) -> list[tuple[str, Any]]:
    reader = csv.DictReader(io.StringIO(text), skipinitialspace=True)
    return [(f"{file} line {reader.line_num}", row) for row in reader]


def _json_rows(text: str, file: Path) -> list[tuple[str, Any]]:
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise DataError(f"the latency table {file} is no valid JSON, line {error.lineno}: {error.msg}") from error
    rows = data.get("rows") if isinstance(data, dict) else data
    if not isinstance(rows, list):
        raise DataError(f'the latency table {file} must be a list of rows, or an object with such a list as "rows"')
    return [(f"{file} row {number}", row) for number, row in enumerate(rows, start=1)]


def _architecture(row: Mapping[str, Any], layer: LayerPlan, where: str) -> Architecture | None:
    text = str(row["architecture"]).strip()
    if text == "dense":
        return None
    try:
        architecture = Architecture.parse(text)
    except PatternError as error:
        raise DataError(f"{where}: {error}, or dense") from error
    for part in layer.parts:
        if architecture.shape != (part.stop - part.start, layer.in_features):
            size = f"{part.stop - part.start}x{layer.in_features}"
            of = f"part {part.name} of layer {layer.fqn}" if part.name else f"layer {layer.fqn}"
            raise DataError(f"{where}: {text} is {architecture.out_features}x{architecture.in_features}, and {of} is {size}")
    if architecture.density > 1:
        raise DataError(f"{where}: {text} has more weights than the dense layer {layer.fqn}")
    return architecture


def _ms(row: Mapping[str, Any], where: str) -> float:
    try:
        ms = float(row["ms"])
    except (TypeError, ValueError):
        ms = math.nan
    if not (math.isfinite(ms) and ms > 0):
        raise DataError(f"{where}: ms must be a positive number, got {row['ms']!r}")
    return ms
