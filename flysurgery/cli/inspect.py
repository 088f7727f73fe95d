"""``flysurgery inspect``: the linear layers of a model, what each is for, and what stands in the way of replacing it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, TypeAlias

import typer

from flysurgery import surgery
from flysurgery.cli import options
from flysurgery.cli.source import find_dense
from flysurgery.cli.tables import print_json, print_table
from flysurgery.errors import PlanError, SelectionError
from flysurgery.surgery import grouped, short_count
from flysurgery.walker import Target, block_names, example_input, positional, walk

COLUMNS = ("layer", "n", "role", "out x in", "calls", "params", "FLOPs", "replaced by", "obstacles")
TOTALS = ("total", "n", "parameters", "share", "FLOPs of one sample")
REPLACEABLE = ("qkv", "attn_out", "ffn_in", "ffn_out")
ALIKE = ("role", "in_features", "out_features", "calls", "replaced_by", "obstacles")
"""What layers that share a row have in common."""

Line: TypeAlias = dict[str, Any]


def inspect(
    model: options.DenseModel,
    model_args: options.ModelArgs = None,
    base: options.Base = None,
    arch: options.Arch = "monarch",
    convs: options.Convs = False,
    as_json: options.Json = False,
) -> None:
    """List a model's linear layers with their roles, weights and obstacles; weights are not needed.

    Shares are those of the model's parameters, and of the FLOPs of all layers listed. What a layer of attention or a feed-forward
    block would be replaced by is told for --arch, without any selection.
    """
    source = find_dense(model, base=base, model_args=model_args)
    network = source.skeleton().model
    example = example_input(network)
    targets = walk(network, example)
    roles = tuple(role for role in REPLACEABLE if any(target.role == role for target in targets))
    try:
        plan = surgery.plan(network, arch, roles=roles, convs=convs, example=example, targets=targets)
        planned = {layer.fqn: layer.architecture for layer in plan.replaced}
    except (PlanError, SelectionError):  # nothing can be replaced, as the obstacles tell
        planned = {}
    samples = surgery.samples_of(positional(network, example))
    lines = [_weighed(target, samples, planned) for target in targets]
    total = sum(parameter.numel() for parameter in network.parameters())
    blocks = block_names(targets)
    if as_json:
        print_json({"model": model, "params": total, "linear_flops": _sum(lines, "flops"), "blocks": list(blocks), "targets": lines})
        return
    _print_lines(lines, total)
    _print_totals(lines, total, blocks)


def _weighed(target: Target, samples: int, planned: Mapping[str, str | None]) -> Line:
    """The target, its parameters, its FLOPs of one sample, and the architectures that would take its place, if any."""
    weights = target.out_features * target.in_features
    params, flops = weights + target.bias * target.out_features, 2 * weights * target.rows // samples
    return asdict(target) | {"params": params, "flops": flops, "replaced_by": planned.get(target.fqn)}


def _print_lines(lines: Sequence[Line], total: int) -> None:
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
                _share(_sum(members, "params"), total),
                _share(_sum(members, "flops"), _sum(lines, "flops")),
                first["replaced_by"] or "-",
                "; ".join(obstacles),
            )
        )
    print_table(COLUMNS, rows, right=("n", "calls", "params", "FLOPs"))


def _print_totals(lines: Sequence[Line], total: int, blocks: Sequence[str]) -> None:
    replaceable = [line for line in lines if line["replaced_by"]]
    kinds = (("layers listed", lines), ("of them replaceable", replaceable))
    rows = [
        (what, str(len(of)), short_count(_sum(of, "params")), _share(_sum(of, "params"), total), short_count(_sum(of, "flops")))
        for what, of in kinds
    ]
    rows.append(("the model", "", short_count(total), _share(total, total), ""))
    typer.echo("")
    print_table(TOTALS, rows, right=TOTALS[1:])
    if blocks:
        typer.echo(f"\nblocks 0 to {len(blocks) - 1}: {blocks[0]} to {blocks[-1]}")


def _sum(lines: Sequence[Line], what: str) -> int:
    return sum(line[what] for line in lines)


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else "-"
