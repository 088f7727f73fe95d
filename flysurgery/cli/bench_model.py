"""``flysurgery bench model``: is conversion worth it on this machine, layer by layer and as a whole."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from flysurgery import surgery
from flysurgery.cli import bench_options as own
from flysurgery.cli import options
from flysurgery.cli.bench_run import BenchRun
from flysurgery.cli.bench_show import TIMES, print_records
from flysurgery.cli.source import find_dense
from flysurgery.cli.tables import print_json
from flysurgery.errors import OptionError

TABLE_HELP = "Write the layers' times to this CSV file, as convert --latency reads it."
Table = Annotated[Path | None, typer.Option("--table", help=TABLE_HELP, metavar="FILE")]
Batch = Annotated[int, typer.Option("--batch", min=1, help="Images a forward.")]
OPTIMIZED_HELP = "Time the whole model as flysurgery.optimize makes it too, converted and dense."
Optimized = Annotated[bool, typer.Option("--optimized", help=OPTIMIZED_HELP)]

COLUMNS = ("layer", "layers", "out_features", "in_features", "rows", "candidate", "backend", "launch", *TIMES)


def model(
    model: options.DenseModel,
    arch: options.Arch = options.Family.monarch,
    nblocks: options.Nblocks = 4,
    rank: options.Rank = None,
    roles: options.Roles = None,
    include: options.Include = None,
    exclude: options.Exclude = None,
    model_args: options.ModelArgs = None,
    base: options.Base = None,
    batch: Batch = 1,
    mode: Annotated[str, typer.Option("--mode", help="One precision: fp32, tf32 (CUDA), fp16 or bf16.", metavar="NAME")] = "fp32",
    launch: own.Launch = own.LaunchName.graph,
    optimized: Optimized = False,
    device: options.Device = None,
    threads: own.Threads = None,
    rounds: own.Rounds = None,
    seed: options.Seed = 0,
    quick: own.Quick = False,
    table: Table = None,
    out: own.Out = None,
    fresh: own.Fresh = False,
    plot: own.Plot = None,
    as_json: options.Json = False,
) -> None:
    """Say whether conversion makes MODEL faster on this machine, and which layers should stay dense; needs no weights."""
    from flysurgery.bench import (
        WHOLE,
        ModelRow,
        ModelSettings,
        Protocol,
        bench_model_layers,
        bench_whole_model,
        check_apart,
        check_file,
        draw_ratios,
        groups_of,
        latency_table,
        launch_on,
        layer_head,
        model_name,
        sentence,
        slower_layers,
        typed,
        whole_head,
        write_records,
    )

    target = own.prepare(device, threads)
    precision, *others = own.modes(mode, target)
    if others:
        raise OptionError(f"bench model takes one mode at a time, got {mode}")
    arguments = options.model_arguments(model_args)
    source = find_dense(model, base=base, model_args=arguments, checkpoint=None)
    skeleton = source.skeleton()
    plan = surgery.plan(
        skeleton.model,
        arch.value,
        roles=options.roles_of(roles),
        include=include,
        exclude=exclude,
        nblocks=nblocks,
        rank=rank,
        base=skeleton.base,
        base_args=skeleton.base_args,
    )
    protocol = Protocol(launch.value, rounds or (7 if quick else 30), 0.1 if quick else 0.5, seed)
    name = model_name(source.name, arguments)
    settings = ModelSettings(name, batch, precision, search=not quick, optimized=optimized, quick=quick, protocol=protocol)
    groups = groups_of(plan)
    launched = {"launch": launch_on(target, protocol)}
    whole = whole_head(settings, target, plan) | launched
    check_apart({"--out": out, "--plot": plot, "--table": table})
    if table is not None:
        check_file(table, "--table")
    with BenchRun(target, ModelRow, out, fresh=fresh, plot=plot) as run:
        for group in bench_model_layers(plan, settings, target, done=lambda key: run.has({**key, **launched})):
            run.add(group, group[0].layer)
        found = [row for group in groups for row in run.rows(layer_head(settings, target, group) | launched)]
        own_rows = list({(row["layer"], row["candidate"]): row for row in found}.values())  # the last where quick ones came before
        if not run.has(whole | {"candidate": "converted, optimized" if optimized else "converted"}):
            build = partial(source.build, pretrained=False, seed=seed, device=target)
            run.add(bench_whole_model(plan, build, settings, target, slower_layers(own_rows, groups)), WHOLE)
        own_rows += run.rows(whole)
    if table is not None:
        write_records(table, latency_table(own_rows, groups))
    if plot is not None:
        drawn = [each for each in own_rows if not each["candidate"].startswith("(")]  # the searched ones would fill the picture
        draw_ratios(drawn, plot, group=("layer",), title=f"{source.name}, batch {batch}, {precision}")
    answer = sentence(own_rows, groups)
    if as_json:
        print_json({"answer": answer, "stay_dense": list(slower_layers(own_rows, groups)), **typed(own_rows)})
        return
    print_records(own_rows, COLUMNS)
    typer.echo(answer)
