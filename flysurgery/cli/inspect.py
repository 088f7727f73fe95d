"""``flysurgery inspect``: the linear layers of a model, what each is for, and what stands in the way of replacing it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from flysurgery.cli import options
from flysurgery.cli.source import find_dense
from flysurgery.cli.tables import print_json, print_table
from flysurgery.surgery import grouped
from flysurgery.walker import Target, walk

COLUMNS = ("layer", "n", "role", "out x in", "calls", "split", "obstacles")


def inspect(
    model: options.Model,
    model_args: options.ModelArgs = None,
    base: options.Base = None,
    as_json: options.Json = False,
) -> None:
    """List a model's linear layers with their roles and obstacles; weights are not needed."""
    source = find_dense(model, base=base, model_args=options.model_arguments(model_args), checkpoint=None)
    targets = walk(source.skeleton().model)
    if as_json:
        print_json({"model": model, "targets": [asdict(target) for target in targets]})
        return
    _print_targets(targets)


def _print_targets(targets: Sequence[Target]) -> None:
    def alike(target: Target) -> object:
        return (target.role, target.in_features, target.out_features, target.calls, target.split, target.obstacles)

    rows = []
    for name, members in grouped(targets, lambda target: target.fqn, alike):
        first = members[0]
        split = ",".join(part.name for part in first.split or ())
        obstacles = "; ".join(f"{each.code}{'' if each.blocking else ' (advice)'}: {each.text}" for each in first.obstacles)
        size = f"{first.out_features}x{first.in_features}"
        rows.append((name, str(len(members)), first.role, size, str(first.calls), split, obstacles))
    print_table(COLUMNS, rows, right=("n", "calls"))
