"""``flysurgery bench layer``: parts of a ViT, from one linear to the whole model, converted beside dense."""

from __future__ import annotations

from typing import Annotated

import typer

from flysurgery.cli import bench_options as own
from flysurgery.cli import options
from flysurgery.cli.bench_run import BenchRun
from flysurgery.cli.bench_show import TIMES, print_records

Parts = Annotated[
    str | None, typer.Option("--part", help="Only these parts: linear*, qkv*, FFN, attention, block, model; separated by commas.")
]
Protocols = Annotated[str, typer.Option("--protocol", help="today (timm's model), paper (separate q, k, v, plain attention), or both.")]
LAUNCHES_HELP = "Out of graph, eager, compile and max-autotune; separated by commas."
Launches = Annotated[str, typer.Option("--launch", help=LAUNCHES_HELP, metavar="NAMES")]
Batch = Annotated[int | None, typer.Option("--batch", min=1, help="Images a forward; by default 128, on a CPU with --quick one.")]

COLUMNS = ("protocol", "unit", "mode", "launch", "compiled", "candidate", "backend", *TIMES)


def layer(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A ViT of timm.")] = "vit_small_patch16_224",
    model_args: options.ModelArgs = None,
    arch: options.Arch = options.Family.gonon,
    part: Parts = None,
    protocol: Protocols = "today",
    batch: Batch = None,
    mode: own.Modes = "fp32",
    launch: Launches = "graph,eager",
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
    from flysurgery.bench import PROTOCOLS, LayerRow, LayerSettings, bench_layers, draw_ratios

    target = own.prepare(device, threads)
    batch = batch or (1 if quick and target.type == "cpu" else 128)
    settings = LayerSettings(
        model=model,
        model_args=options.model_arguments(model_args),
        arch=arch.value,
        protocols=PROTOCOLS if protocol == "both" else (protocol,),
        modes=own.modes(mode, target),
        launches=options.names(launch, "--launch"),
        names=None if part is None else options.names(part, "--part"),
        batch=batch,
        rounds=rounds or (7 if quick else 30),
        seconds=0.1 if quick else 0.5,
        seed=seed,
        quick=quick,
    )
    with BenchRun(target, LayerRow, out, fresh=fresh, plot=plot) as run:
        for group in bench_layers(settings, target, done=run.has):
            run.add(group, f"{group[0].protocol} {group[0].unit} {group[0].mode}")
    if plot is not None:
        draw_ratios(run.records, plot, group=("protocol", "unit", "mode", "launch"), title=f"{model}, batch {batch}, {arch.value}")
    if as_json:
        run.print_json()
    else:
        print_records(run.records, COLUMNS)
