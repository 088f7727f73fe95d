"""What ``flysurgery convert`` prints: the layers, what replaces them, the totals, and how it was chosen."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

import typer

from flysurgery.cli.tables import accuracy_rows, print_changes, print_json, print_table
from flysurgery.evaluation import Comparison
from flysurgery.surgery import (
    NO_BREAK,
    LayerPlan,
    Measurement,
    Plan,
    Report,
    Row,
    Tradeoff,
    fidelity_rows,
    grouped,
    permutation_tables,
    short_count,
)

Layers: TypeAlias = Sequence[LayerPlan | Row]

PLANNED = ("layer", "n", "role", "out x in", "params", "FLOPs", "family", "architecture")
DONE = ("layer", "n", "role", "params", "FLOPs", "worst error", "least energy", "family", "architecture")
CALIBRATED = ("layer", "n", "role", "params", "FLOPs", "output error", "plain error", "family", "architecture")
KEPT = ("kept dense", "n", "role", "out x in", "why")
NUMBERS = ("n", "params", "FLOPs", "worst error", "least energy", "output error", "plain error")


def print_plan(plan: Plan, tradeoff: Tradeoff | None, measurement: Measurement | None, *, as_json: bool) -> None:
    """Print what convert would do. FLOPs are those of one sample's forward."""
    chosen_by = {"tradeoff": tradeoff, "measurement": measurement}
    if as_json:
        print_json({"plan": plan.to_json()} | {name: each.to_json() for name, each in chosen_by.items() if each is not None})
        return
    _print_layers(PLANNED, plan.layers)
    typer.echo("")
    print_changes("total", _layer_totals(plan.layers))
    _print_each(tradeoff, measurement)


def print_report(report: Report, folder: Path, accuracy: Comparison | None) -> None:
    """Print what convert did.

    A layer's error is ``norm(W - W') / norm(W)`` and its energy the share of ``norm(W)**2`` that is kept; of layers
    that are alike, the worst is shown. After a calibration the error is that of the layer's output on held-out samples, beside that of the
    plain projection.
    """
    _print_layers(DONE if report.calibration is None else CALIBRATED, report.rows)
    totals = [_total("parameters of the model", report.model_params_before, report.model_params_after), *_layer_totals(report.rows)]
    if accuracy is not None:
        totals += accuracy_rows(accuracy.before, accuracy.after)
    if report.fidelity is not None:
        totals += fidelity_rows(report.fidelity, report.reconstruction)
    typer.echo("")
    print_changes("total", totals)
    _print_each(*report.remarks)
    _print_each(report.calibration, permutation_tables(report.permutations) or None, report.tradeoff, report.measurement)
    typer.echo(f"\nsaved in {folder}")


def _print_each(*parts: object) -> None:
    for part in parts:
        if part is not None:
            typer.echo(f"\n{part}")


def _print_layers(columns: Sequence[str], layers: Layers) -> None:
    groups = grouped(layers, lambda layer: layer.fqn, lambda layer: (layer.role, layer.size, layer.architecture, layer.reason))
    replaced = [_cells(name, members) for name, members in groups if members[0].status == "replace"]
    kept = [_cells(name, members) for name, members in groups if members[0].status == "keep"]
    print_table(columns, [[cells[column] for column in columns] for cells in replaced], right=NUMBERS)
    if kept:
        typer.echo("")
        print_table(KEPT, [[cells[column] for column in KEPT] for cells in kept], right=NUMBERS)


def _cells(name: str, members: Layers) -> dict[str, str]:
    first = members[0]
    worst = max(getattr(each, "relative_error", None) or 0.0 for each in members)
    calibrated = [found for found in (getattr(each, "calibration", None) for each in members) if found is not None]
    return {
        "output error": f"{max((found.output_error for found in calibrated), default=0.0):.3f}",
        "plain error": f"{max((found.plain_output_error for found in calibrated), default=0.0):.3f}",
        "layer": name,
        "kept dense": name,
        "n": str(len(members)),
        "role": first.role,
        "out x in": first.size,
        "params": _change(sum(each.params_before for each in members), sum(each.params_after for each in members)),
        "FLOPs": _change(sum(each.flops_before for each in members), sum(each.flops_after for each in members)),
        "worst error": f"{worst:.3f}",
        "least energy": f"{1 - worst**2:.3f}",
        "family": first.family or "",
        "architecture": (first.architecture or "").replace("),(", "), ("),
        "why": f"{first.reason.code}: {first.reason.text}" if first.reason else "",
    }


def _layer_totals(layers: Layers) -> list[tuple[str, ...]]:
    replaced = [layer for layer in layers if layer.status == "replace"]
    return [
        _total(
            "parameters of the replaced layers", sum(each.params_before for each in replaced), sum(each.params_after for each in replaced)
        ),
        _total("FLOPs of all linear layers", sum(each.flops_before for each in layers), sum(each.flops_after for each in layers)),
    ]


def _total(what: str, before: int, after: int) -> tuple[str, ...]:
    return (what, short_count(before), short_count(after), f"{after / before - 1:+.1%}")


def _change(before: int, after: int) -> str:
    return " -> ".join(short_count(count).replace(" ", NO_BREAK) for count in (before, after))
