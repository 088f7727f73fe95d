"""``flysurgery bench``: how long things take here, each against dense in the same run."""

from __future__ import annotations

import typer

from flysurgery.cli import bench_options as own
from flysurgery.cli import options
from flysurgery.cli.bench_layer import layer
from flysurgery.cli.bench_model import model
from flysurgery.cli.bench_projection import projection
from flysurgery.cli.bench_show import TIMES, print_records

app = typer.Typer(help="Measure speed: times and ratios to dense, taken in one run.")
app.command("layer")(layer)
app.command("model")(model)
app.command("projection")(projection)

QUICK_ROWS = 788
"""Four images at 197 tokens."""


@app.callback(invoke_without_command=True)
def bench(context: typer.Context) -> None:
    """Measure speed: times and ratios to dense, taken in one run."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@app.command("multiply")
def multiply(
    arch: own.Families = None,
    width: own.Width = 384,
    rows: own.Rows = None,
    mode: own.Modes = "fp32",
    launch: own.Launch = own.LaunchName.graph,
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
    from flysurgery.bench import MultiplyRow, Protocol, bench_multiply, draw_ratios
    from flysurgery.cli.bench_run import BenchRun

    target = own.prepare(device, threads)
    families = own.families(arch)
    modes = own.modes(mode, target)
    settings = Protocol(launch.value, rounds or (7 if quick else 30), 0.2 if quick else 1.0, seed)
    count = rows or (QUICK_ROWS if quick else 3152)
    with BenchRun(target, MultiplyRow, out, fresh=fresh, plot=plot) as run:
        for name in modes:
            for family in families:
                measured = bench_multiply(
                    family, width=width, rows=count, mode=name, device=target, protocol=settings, quick=quick, done=run.has
                )
                for group in measured:
                    run.add(group, f"{family} {group[0].layer} {name}")
    if plot is not None:
        draw_ratios(run.records, plot, group=("arch", "layer", "mode"), title=f"{run.records[0]['device']}, {count} rows")
    if as_json:
        run.print_json()
    else:
        columns = ("arch", "layer", "mode", "candidate", "backend", "launch", *TIMES)
        print_records(run.records, columns)
