"""``flysurgery bench``: how long things take here, each against dense in the same run."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Annotated

import typer

from flysurgery.cli import bench_options as own
from flysurgery.cli import options
from flysurgery.cli.options import MEASUREMENT, OUTPUT, Command, Group, option
from flysurgery.errors import OptionError

if TYPE_CHECKING:
    from flysurgery.bench import Record

app = typer.Typer(cls=Group, help="Measure speed: times and ratios to dense, taken in one run.")

QUICK_ROWS, ROWS = 788, 3152
"""Four and sixteen images at 197 tokens."""

Rows = Annotated[int | None, option(MEASUREMENT, "--rows", "Rows of x, that is tokens of all images; by default 3152.", "N", 1)]
PART_HELP = "Only these parts: linear*, qkv*, FFN, attention, block, model; separated by commas."
PROTOCOL_HELP = "today (timm's model), paper (separate q, k, v, plain attention), or both."
LAUNCHES_HELP = "Out of graph, eager, compile and max-autotune; separated by commas."
LAYER_BATCH_HELP = "Images a forward; by default 128, on a CPU with --quick one."
MODE_HELP = "One precision: fp32, tf32 (CUDA), fp16 or bf16."
OPTIMIZED_HELP = "Time the whole model as flysurgery.optimize makes it too, converted and dense."
TABLE_HELP = "Write the layers' times to this CSV file, as convert --latency reads it."

MULTIPLY_COLUMNS = ("arch", "layer", "mode", "candidate", "backend", "launch", *own.TIMES)
LAYER_COLUMNS = ("protocol", "unit", "mode", "launch", "compiled", "candidate", "backend", *own.TIMES)
MODEL_COLUMNS = ("layer", "layers", "out_features", "in_features", "rows", "candidate", "backend", "launch", *own.TIMES)
PROJECTION_COLUMNS = ("arch", "layer", "out_features", "in_features", "density", "matrix", "seconds", "relative_error", "status")


@app.callback(invoke_without_command=True)
def bench(context: typer.Context) -> None:
    """Measure speed: times and ratios to dense, taken in one run."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@app.command("multiply", cls=Command)
def multiply(
    arch: own.Families = None,
    width: own.Width = 384,
    rows: Rows = None,
    mode: own.Modes = "fp32",
    launch: own.Launch = "graph",
    device: options.Device = None,
    threads: own.Threads = None,
    rounds: own.Rounds = None,
    seed: options.Seed = 0,
    quick: own.Quick = False,
    out: own.Out = None,
    fresh: own.Fresh = False,
    plot: own.Plot = None,
    as_json: options.Json = False,
) -> None:
    """Time every backend on the layers of a transformer block."""
    from flysurgery import bench as measuring
    from flysurgery.cli import bench_run as run_of

    target = run_of.prepare(device, threads)
    modes = measuring.modes_of(mode, target)
    protocol = run_of.protocol_of(launch, rounds, seed, quick=quick, seconds=(0.2, 1.0))
    count = rows or (QUICK_ROWS if quick else ROWS)
    with run_of.BenchRun(target, measuring.MultiplyRow, out, fresh=fresh, plot=plot) as run:
        for name in modes:
            for family in [each.value for each in arch or (own.Family.gonon, own.Family.monarch)]:
                for group in measuring.bench_multiply(
                    family, width=width, rows=count, mode=name, device=target, protocol=protocol, quick=quick, done=run.has
                ):
                    run.add(group, f"{family} {group[0].layer} {name}")
    if plot is not None:
        title = f"{run.records[0]['device']}, {count} rows"
        measuring.draw_ratios(run.records, plot, group=("arch", "layer", "mode"), title=title)
    run.print(MULTIPLY_COLUMNS, as_json=as_json)


@app.command("layer", cls=Command)
def layer(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A ViT of timm.")] = "vit_small_patch16_224",
    model_args: options.ModelArgs = None,
    arch: options.Arch = "gonon",
    part: Annotated[str | None, option(MEASUREMENT, "--part", PART_HELP, "NAMES")] = None,
    protocol: Annotated[str, option(MEASUREMENT, "--protocol", PROTOCOL_HELP, "NAME")] = "today",
    batch: Annotated[int | None, option(MEASUREMENT, "--batch", LAYER_BATCH_HELP, "N", 1)] = None,
    mode: own.Modes = "fp32",
    launch: Annotated[str, option(MEASUREMENT, "--launch", LAUNCHES_HELP, "NAMES")] = "graph,eager",
    device: options.Device = None,
    threads: own.Threads = None,
    rounds: own.Rounds = None,
    seed: options.Seed = 0,
    quick: own.Quick = False,
    out: own.Out = None,
    fresh: own.Fresh = False,
    plot: own.Plot = None,
    as_json: options.Json = False,
) -> None:
    """Time the parts of a ViT with random weights: linears, FFN, attention, block, model."""
    from flysurgery import bench as measuring
    from flysurgery.cli import bench_run as run_of

    target = run_of.prepare(device, threads)
    batch = batch or (1 if quick and target.type == "cpu" else 128)
    settings = measuring.LayerSettings(
        model=model,
        model_args=options.model_arguments(model_args),
        arch=arch,
        protocols=measuring.PROTOCOLS if protocol == "both" else (protocol,),
        modes=measuring.modes_of(mode, target),
        launches=options.names(launch, "--launch"),
        names=None if part is None else options.names(part, "--part"),
        batch=batch,
        rounds=rounds or (7 if quick else 30),
        seconds=0.1 if quick else 0.5,
        seed=seed,
        quick=quick,
    )
    with run_of.BenchRun(target, measuring.LayerRow, out, fresh=fresh, plot=plot) as run:
        for group in measuring.bench_layers(settings, target, done=run.has):
            run.add(group, f"{group[0].protocol} {group[0].unit} {group[0].mode}")
    if plot is not None:
        title = f"{model}, batch {batch}, {arch}"
        measuring.draw_ratios(run.records, plot, group=("protocol", "unit", "mode", "launch"), title=title)
    run.print(LAYER_COLUMNS, as_json=as_json)


@app.command("model", cls=Command)
def model(
    model: options.DenseModel,
    arch: options.Arch = "monarch",
    nblocks: options.Nblocks = 4,
    rank: options.Rank = None,
    roles: options.Roles = None,
    include: options.Include = None,
    exclude: options.Exclude = None,
    model_args: options.ModelArgs = None,
    base: options.Base = None,
    batch: Annotated[int, option(MEASUREMENT, "--batch", "Images a forward.", "N", 1)] = 1,
    mode: Annotated[str, option(MEASUREMENT, "--mode", MODE_HELP, "NAME")] = "fp32",
    launch: own.Launch = "graph",
    optimized: Annotated[bool, option(MEASUREMENT, "--optimized", OPTIMIZED_HELP)] = False,
    device: options.Device = None,
    threads: own.Threads = None,
    rounds: own.Rounds = None,
    seed: options.Seed = 0,
    quick: own.Quick = False,
    table: Annotated[Path | None, option(OUTPUT, "--table", TABLE_HELP, "FILE")] = None,
    out: own.Out = None,
    fresh: own.Fresh = False,
    plot: own.Plot = None,
    as_json: options.Json = False,
) -> None:
    """Say whether conversion makes MODEL faster on this machine, and which layers should stay dense; needs no weights."""
    from flysurgery import bench as measuring
    from flysurgery import surgery
    from flysurgery.cli import bench_run as run_of
    from flysurgery.cli.source import find_dense
    from flysurgery.cli.tables import print_json

    target = run_of.prepare(device, threads)
    precision, *others = measuring.modes_of(mode, target)
    if others:
        raise OptionError(f"bench model takes one mode at a time, got {mode}")
    source = find_dense(model, base=base, model_args=model_args)
    skeleton = source.skeleton()
    plan = surgery.plan(
        skeleton.model,
        arch,
        roles=options.roles_of(roles),
        include=include,
        exclude=exclude,
        nblocks=nblocks,
        rank=rank,
        base=skeleton.base,
        base_args=skeleton.base_args,
    )
    protocol = run_of.protocol_of(launch, rounds, seed, quick=quick, seconds=(0.1, 0.5))
    name = measuring.model_name(source.name, options.model_arguments(model_args))
    settings = measuring.ModelSettings(name, batch, precision, search=not quick, optimized=optimized, quick=quick, protocol=protocol)
    groups = measuring.groups_of(plan)
    launched = {"launch": measuring.launch_on(target, protocol)}
    whole = measuring.whole_head(settings, target, plan) | launched
    measuring.check_apart({"--out": out, "--plot": plot, "--table": table})
    if table is not None:
        measuring.check_file(table, "--table")
    with run_of.BenchRun(target, measuring.ModelRow, out, fresh=fresh, plot=plot) as run:
        for group in measuring.bench_model_layers(plan, settings, target, done=lambda key: run.has({**key, **launched})):
            run.add(group, group[0].layer)
        found = [row for group in groups for row in run.rows(measuring.layer_head(settings, target, group) | launched)]
        rows = list({(row["layer"], row["candidate"]): row for row in found}.values())  # the last where quick ones came before
        if not run.has(whole | {"candidate": "converted, optimized" if optimized else "converted"}):
            build = partial(source.build, pretrained=False, seed=seed, device=target)
            slower = measuring.slower_layers(rows, groups)
            run.add(measuring.bench_whole_model(plan, build, settings, target, slower), measuring.WHOLE)
        rows += run.rows(whole)
    if table is not None:
        measuring.write_records(table, measuring.latency_table(rows, groups))
    if plot is not None:
        drawn = [each for each in rows if not each["candidate"].startswith("(")]  # the searched ones would fill the picture
        measuring.draw_ratios(drawn, plot, group=("layer",), title=f"{source.name}, batch {batch}, {precision}")
    answer = measuring.sentence(rows, groups)
    if as_json:
        print_json({"answer": answer, "stay_dense": list(measuring.slower_layers(rows, groups)), **measuring.typed(rows)})
        return
    run_of.print_records(rows, MODEL_COLUMNS)
    typer.echo(answer)


@app.command("projection", cls=Command)
def projection(
    arch: own.Families = None,
    width: own.Width = 384,
    threads: own.Threads = None,
    seed: options.Seed = 0,
    quick: own.Quick = False,
    out: own.Out = None,
    fresh: own.Fresh = False,
    plot: own.Plot = None,
    as_json: options.Json = False,
) -> None:
    """Time the projection of the layers of a transformer block onto each family of architectures."""
    import torch

    from flysurgery import bench as measuring
    from flysurgery.cli import bench_run as run_of

    run_of.prepare("cpu", threads)
    with run_of.BenchRun(torch.device("cpu"), measuring.ProjectionRow, out, fresh=fresh, plot=plot) as run:
        for family in [each.value for each in arch or own.Family]:
            for group in measuring.bench_projection(family, width=width, runs=1 if quick else 3, seed=seed, done=run.has):
                run.add(group, f"{family} {group[0].layer}")
    if plot is not None:
        _draw_projection(run.records, plot)
    run.print(PROJECTION_COLUMNS, as_json=as_json)


def _draw_projection(records: list[Record], plot: Path) -> None:
    """A line for each family and kind of matrix; layers of one size, as up and down, are one point, their mean."""
    from flysurgery.bench import draw_lines

    times: dict[str, dict[int, list[float]]] = {}
    for each in records:
        if each["seconds"]:
            weights = int(each["out_features"]) * int(each["in_features"])
            times.setdefault(f"{each['arch']}, {each['matrix']}", {}).setdefault(weights, []).append(float(each["seconds"]))
    series = {name: [(weights, fmean(seconds)) for weights, seconds in points.items()] for name, points in times.items()}
    draw_lines(series, plot, across="weights of the dense matrix", up="seconds", level=None)
