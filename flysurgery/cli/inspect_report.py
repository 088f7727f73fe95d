"""What ``flysurgery inspect`` prints: a row for layers that are alike, and the totals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, TypeAlias

import typer

from flysurgery.cli.tables import print_table
from flysurgery.surgery import grouped, short_count
from flysurgery.walker import Target

COLUMNS = ("layer", "n", "role", "out x in", "calls", "params", "FLOPs", "replaced by", "obstacles")
TOTALS = ("total", "n", "parameters", "share", "FLOPs of one sample")
ALIKE = ("role", "in_features", "out_features", "calls", "replaced_by", "obstacles")
"""What layers that share a row have in common."""

Line: TypeAlias = dict[str, Any]


def weighed(target: Target, samples: int, planned: Mapping[str, str | None]) -> Line:
    """The target, its parameters, its FLOPs of one sample, and the architectures that would take its place, if any."""
    weights = target.out_features * target.in_features
    params, flops = weights + target.bias * target.out_features, 2 * weights * target.rows // samples
    return asdict(target) | {"params": params, "flops": flops, "replaced_by": planned.get(target.fqn)}


def print_lines(lines: Sequence[Line], total: int, blocks: Sequence[str]) -> None:
    """Print the layers, and below them the totals; ``total`` counts the model's parameters."""
    _print_layers(lines, total)
    _print_totals(lines, total, blocks)


def _print_layers(lines: Sequence[Line], total: int) -> None:
    rows = []
    for name, members in grouped(lines, lambda line: line["fqn"], lambda line: str([line[key] for key in ALIKE])):
        first = members[0]
        obstacles = [f"{each['code']}{'' if each['blocking'] else ' (advice)'}: {each['text']}" for each in first["obstacles"]]
        rows.append(
            (
                name,
                str(len(members)),
                first["role"],
                f"{first['out_features']}x{first['in_features']}",
                str(first["calls"]),
                _share(sum_of(members, "params"), total),
                _share(sum_of(members, "flops"), sum_of(lines, "flops")),
                first["replaced_by"] or "-",
                "; ".join(obstacles),
            )
        )
    print_table(COLUMNS, rows, right=("n", "calls", "params", "FLOPs"))


def _print_totals(lines: Sequence[Line], total: int, blocks: Sequence[str]) -> None:
    replaceable = [line for line in lines if line["replaced_by"]]
    kinds = (("layers listed", lines), ("of them replaceable", replaceable))
    rows = [
        (what, str(len(of)), short_count(sum_of(of, "params")), _share(sum_of(of, "params"), total), short_count(sum_of(of, "flops")))
        for what, of in kinds
    ]
    rows.append(("the model", "", short_count(total), _share(total, total), ""))
    typer.echo("")
    print_table(TOTALS, rows, right=TOTALS[1:])
    if blocks:
        typer.echo(f"\nblocks 0 to {len(blocks) - 1}: {blocks[0]} to {blocks[-1]}")


def sum_of(lines: Sequence[Line], what: str) -> int:
    """The sum of one number of the layers."""
    return sum(line[what] for line in lines)


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else "-"
