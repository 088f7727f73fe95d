"""``flysurgery inspect``: the linear layers of a model, what each is for, and what stands in the way of replacing it."""

from collections.abc import Sequence
from dataclasses import asdict
from operator import itemgetter
from typing import Any

from flysurgery.cli import options
from flysurgery.tables import blocks_of_text, layer_table

ALIKE = ("role", "in_features", "out_features", "calls", "obstacles")  # what layers that share a row have in common


def inspect(
    model: options.DenseModel,
    model_args: options.ModelArgs = None,
    base: options.Base = None,
    as_json: options.Json = False,
) -> None:
    """List a model's linear layers with their roles, weights and obstacles; weights are not needed.

    Shares are those of the model's parameters, and of the FLOPs of all layers listed. What would replace them is told by convert --dry-run.
    """
    from flysurgery import surgery
    from flysurgery.cli.source import find_dense
    from flysurgery.cli.tables import show
    from flysurgery.walker import block_names, example_input, positional, walk

    network = find_dense(model, base=base, model_args=model_args).skeleton()
    example = example_input(network)
    targets = walk(network, example)
    samples = surgery.count_samples(positional(network, example))
    lines = []
    for target in targets:
        weights = target.out_features * target.in_features
        counts = {"params": weights + target.bias * target.out_features, "flops": 2 * weights * target.rows // samples}
        lines.append(asdict(target) | counts)
    total = sum(parameter.numel() for parameter in network.parameters())
    blocks = block_names(targets)
    last = f"blocks 0 to {len(blocks) - 1}: {blocks[0]} to {blocks[-1]}" if blocks else None
    document = {"model": model, "params": total, "linear_flops": _sum(lines, "flops"), "blocks": list(blocks), "targets": lines}
    show(document, blocks_of_text(_layers(lines, total), last), as_json=as_json)


def _layers(lines: Sequence[dict[str, Any]], total: int) -> str:
    """A row for layers that are alike; ``total`` counts the model's parameters."""

    def obstacles(members: Sequence[dict[str, Any]]) -> str:
        found = members[0]["obstacles"]
        return "; ".join(f"{each['code']}{'' if each['blocking'] else ' (advice)'}: {each['text']}" for each in found)

    columns = {
        "role": lambda members: members[0]["role"],
        "out x in": lambda members: f"{members[0]['out_features']}x{members[0]['in_features']}",
        "calls": lambda members: str(members[0]["calls"]),
        "params": lambda members: _share(_sum(members, "params"), total),
        "FLOPs": lambda members: _share(_sum(members, "flops"), _sum(lines, "flops")),
        "obstacles": obstacles,
    }
    return layer_table("layer", lines, lambda line: str([line[key] for key in ALIKE]), columns, name=itemgetter("fqn"))


def _sum(lines: Sequence[dict[str, Any]], what: str) -> int:
    return sum(line[what] for line in lines)


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else "-"
