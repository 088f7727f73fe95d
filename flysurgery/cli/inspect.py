"""``flysurgery inspect``: the linear layers of a model, what each is for, and what stands in the way of replacing it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

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


@dataclass(frozen=True)
class Line:
    """A target and what it weighs: parameters, FLOPs of one sample, and the architectures that would take its place, if any."""

    target: Target
    params: int
    flops: int
    replaced_by: str | None


def inspect(
    model: options.DenseModel,
    model_args: options.ModelArgs = None,
    base: options.Base = None,
    arch: options.Arch = options.Family.monarch,
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
        plan = surgery.plan(network, arch.value, roles=roles, convs=convs, example=example, targets=targets)
        planned = {layer.fqn: layer.architecture for layer in plan.replaced}
    except (PlanError, SelectionError):  # nothing can be replaced, as the obstacles tell
        planned = {}
    samples = surgery.samples_of(positional(network, example))
    lines = [_line(target, samples, planned) for target in targets]
    total = sum(parameter.numel() for parameter in network.parameters())
    blocks = block_names(targets)
    if as_json:
        rows = [asdict(line.target) | {"params": line.params, "flops": line.flops, "replaced_by": line.replaced_by} for line in lines]
        print_json({"model": model, "params": total, "linear_flops": _flops(lines), "blocks": list(blocks), "targets": rows})
        return
    _print_lines(lines, total)
    _print_totals(lines, total, blocks)


def _line(target: Target, samples: int, planned: Mapping[str, str | None]) -> Line:
    weights = target.out_features * target.in_features
    return Line(target, weights + target.bias * target.out_features, 2 * weights * target.rows // samples, planned.get(target.fqn))


def _print_lines(lines: Sequence[Line], total: int) -> None:
    def alike(line: Line) -> object:
        target = line.target
        return (target.role, target.in_features, target.out_features, target.calls, line.replaced_by, target.obstacles)

    flops = _flops(lines)
    rows = []
    for name, members in grouped(lines, lambda line: line.target.fqn, alike):
        first = members[0].target
        obstacles = "; ".join(f"{each.code}{'' if each.blocking else ' (advice)'}: {each.text}" for each in first.obstacles)
        rows.append(
            (
                name,
                str(len(members)),
                first.role,
                f"{first.out_features}x{first.in_features}",
                str(first.calls),
                _share(_params(members), total),
                _share(_flops(members), flops),
                members[0].replaced_by or "-",
                obstacles,
            )
        )
    print_table(COLUMNS, rows, right=("n", "calls", "params", "FLOPs"))


def _print_totals(lines: Sequence[Line], total: int, blocks: Sequence[str]) -> None:
    replaceable = [line for line in lines if line.replaced_by]
    kinds = (("layers listed", lines), ("of them replaceable", replaceable))
    rows = [(what, str(len(of)), short_count(_params(of)), _share(_params(of), total), short_count(_flops(of))) for what, of in kinds]
    rows.append(("the model", "", short_count(total), _share(total, total), ""))
    typer.echo("")
    print_table(TOTALS, rows, right=TOTALS[1:])
    if blocks:
        typer.echo(f"\nblocks 0 to {len(blocks) - 1}: {blocks[0]} to {blocks[-1]}")


def _params(lines: Sequence[Line]) -> int:
    return sum(line.params for line in lines)


def _flops(lines: Sequence[Line]) -> int:
    return sum(line.flops for line in lines)


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else "-"
