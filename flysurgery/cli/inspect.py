"""``flysurgery inspect``: the linear layers of a model, what each is for, and what stands in the way of replacing it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from operator import itemgetter
from typing import Any

import typer

from flysurgery.cli import options

REPLACEABLE = ("qkv", "attn_out", "ffn_in", "ffn_out")

TOTALS = ("total", "n", "parameters", "share", "FLOPs of one sample")
ALIKE = ("role", "in_features", "out_features", "calls", "replaced_by", "obstacles")
"""What layers that share a row have in common."""


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
    from flysurgery import surgery
    from flysurgery.cli.source import find_dense
    from flysurgery.cli.tables import print_json
    from flysurgery.errors import PlanError, SelectionError
    from flysurgery.walker import block_names, example_input, positional, walk

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
    lines = []
    for target in targets:
        weights = target.out_features * target.in_features
        counts = {"params": weights + target.bias * target.out_features, "flops": 2 * weights * target.rows // samples}
        lines.append(asdict(target) | counts | {"replaced_by": planned.get(target.fqn)})
    total = sum(parameter.numel() for parameter in network.parameters())
    blocks = block_names(targets)
    if as_json:
        print_json({"model": model, "params": total, "linear_flops": _sum(lines, "flops"), "blocks": list(blocks), "targets": lines})
        return
    text = surgery.blocks_of_text(_layers(lines, total), _totals(lines, total))
    typer.echo(f"{text}\n\nblocks 0 to {len(blocks) - 1}: {blocks[0]} to {blocks[-1]}" if blocks else text)


def _layers(lines: Sequence[dict[str, Any]], total: int) -> str:
    """A row for layers that are alike; ``total`` counts the model's parameters."""
    from flysurgery.surgery import layer_table

    def obstacles(members: Sequence[dict[str, Any]]) -> str:
        found = members[0]["obstacles"]
        return "; ".join(f"{each['code']}{'' if each['blocking'] else ' (advice)'}: {each['text']}" for each in found)

    columns = {
        "role": lambda members: members[0]["role"],
        "out x in": lambda members: f"{members[0]['out_features']}x{members[0]['in_features']}",
        "calls": lambda members: str(members[0]["calls"]),
        "params": lambda members: _share(_sum(members, "params"), total),
        "FLOPs": lambda members: _share(_sum(members, "flops"), _sum(lines, "flops")),
        "replaced by": lambda members: members[0]["replaced_by"] or "-",
        "obstacles": obstacles,
    }
    return layer_table("layer", lines, lambda line: str([line[key] for key in ALIKE]), columns, name=itemgetter("fqn"))


def _totals(lines: Sequence[dict[str, Any]], total: int) -> str:
    from flysurgery.surgery import short_count, text_table

    rows = []
    for what, of in (("layers listed", lines), ("of them replaceable", [line for line in lines if line["replaced_by"]])):
        params, flops = _sum(of, "params"), _sum(of, "flops")
        rows.append((what, str(len(of)), short_count(params), _share(params, total), short_count(flops)))
    rows.append(("the model", "", short_count(total), _share(total, total), ""))
    return text_table(TOTALS, rows, right=TOTALS[1:])


def _sum(lines: Sequence[dict[str, Any]], what: str) -> int:
    return sum(line[what] for line in lines)


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else "-"
