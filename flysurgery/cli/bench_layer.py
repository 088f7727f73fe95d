"""``flysurgery bench layer``: parts of a ViT, from one linear to the whole model, converted beside dense."""

from __future__ import annotations

from typing import Annotated

import typer

from flysurgery.cli import bench_options as own
from flysurgery.cli import options
from flysurgery.cli.bench_run import BenchRun
from flysurgery.cli.bench_show import TIMES, print_records
from flysurgery.errors import OptionError

Part = Annotated[
    str | None, typer.Option("--part", help="Only these parts: linear*, qkv*, FFN, attention, block, model; separated by commas.")
]
Protocols = Annotated[str, typer.Option("--protocol", help="today (timm's model), paper (separate q, k, v, plain attention), or both.")]
LAUNCHES_HELP = "Out of graph, eager, compile and max-autotune; separated by commas."
Launches = Annotated[str, typer.Option("--launch", help=LAUNCHES_HELP, metavar="NAMES")]

COLUMNS = ("protocol", "unit", "mode", "launch", "compiled", "candidate", "backend", *TIMES)


def layer(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A ViT of timm.")] = "vit_small_patch16_224",
    model_args: options.ModelArgs = None,
    arch: options.Arch = options.Family.gonon,
    part: Part = None,
    protocol: Protocols = "today",
    batch: own.Batch = 128,
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
    from flysurgery.bench import LAUNCHES, PROTOCOLS, LayerSettings, bench_layers, draw_ratios

    target = own.prepare(device, threads)
    settings = LayerSettings(
        model=model,
        model_args=options.model_arguments(model_args),
        arch=arch.value,
        protocols=PROTOCOLS if protocol == "both" else (protocol,),
        modes=own.modes(mode, target),
        launches=_known(options.names(launch, "--launch"), LAUNCHES),
        names=None if part is None else options.names(part, "--part"),
        batch=batch,
        rounds=rounds or (7 if quick else 30),
        seconds=0.1 if quick else 0.5,
        seed=seed,
        quick=quick,
    )
    with BenchRun(target, out, fresh=fresh, plot=plot) as run:
        for group in bench_layers(settings, target, done=run.has):
            run.add(group, f"{group[0].protocol} {group[0].unit} {group[0].mode}")
    if not run.records:
        raise OptionError(f"no part of {model} is called {part}; the parts are linear*, qkv*, FFN, attention, block, model")
    if plot is not None:
        draw_ratios(run.records, plot, group=("protocol", "unit", "mode", "launch"), title=f"{model}, batch {batch}, {arch.value}")
    if as_json:
        run.print_json()
    else:
        print_records(run.records, COLUMNS)


def _known(wanted: tuple[str, ...], known: tuple[str, ...]) -> tuple[str, ...]:
    for name in wanted:
        if name not in known:
            raise OptionError(f"there is no launch '{name}'; choose from {', '.join(known)}")
    return wanted
