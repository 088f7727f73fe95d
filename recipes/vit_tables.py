"""What the recipes of Tables 3 and 6 share: the paper's numbers, their options, and the run."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import recipe

from flysurgery.bench import CANDIDATES, LAUNCHES, LayerRow, LayerSettings, Record, bench_layers, bench_training, draw_ratios
from flysurgery.bench.compiled import COMPILED
from flysurgery.cli.bench_show import TIMES
from flysurgery.cli.options import model_arguments, names

PAPER = {
    ("linear N x N", "bmm"): 0.82,
    ("linear N x N", "layer"): 0.50,
    ("linear N x N + bias", "bmm"): 0.97,
    ("linear N x N + bias", "layer"): 0.66,
    ("linear 4N x N", "bmm"): 0.80,
    ("linear 4N x N", "layer"): 0.78,
    ("linear 4N x N + bias", "bmm"): 0.93,
    ("linear 4N x N + bias", "layer"): 0.90,
    ("linear N x 4N", "bmm"): 0.91,
    ("linear N x 4N", "layer"): 0.58,
    ("linear N x 4N + bias", "bmm"): 0.94,
    ("linear N x 4N + bias", "layer"): 0.61,
    ("FFN", "bmm"): 0.91,
    ("FFN", "layer"): 0.77,
    ("attention", "bmm"): 0.87,
    ("attention", "layer"): 0.79,
    ("block", "bmm"): 0.90,
    ("block", "layer"): 0.78,
    ("model", "bmm"): 0.89,
    ("model", "layer"): 0.78,
}
"""Time over dense in Tables 3 and 6 of Gonon et al. 2024 (A100, float32); their kernel stands beside our layer."""

GROUPS = ("model", "arch", "batch", "protocol", "unit", "launch", "compiled")
COLUMNS = ("protocol", "unit", "batch", "mode", "launch", "compiled", "candidate", "backend", "paper_ratio", *TIMES)


def arguments(description: str | None, *, launches: str, parts: str) -> argparse.ArgumentParser:
    """The options of both recipes; ``parts`` as ``--parts`` takes them."""
    parser = recipe.arguments(description, modes="all", seconds=0.5)
    recipe.add_model(parser)
    parser.add_argument("--arch", default="gonon", help="gonon (widths that are multiples of 24), monarch or lowrank")
    parser.add_argument("--batches", type=recipe.counts, help="images a forward, such as 1,8,128; 128 by default")
    parser.add_argument("--parts", default=parts, help=f"out of {parts}; linear* are all linears")
    parser.add_argument("--candidates", default=",".join(CANDIDATES), help="out of these")
    parser.add_argument("--launches", default=launches, help=f"out of {', '.join(LAUNCHES)}; the compiler's for today's protocol only")
    return parser


def run(options: argparse.Namespace, *, training: bool = False) -> None:
    """Measure, print and draw."""
    device, modes = recipe.device_and_modes(options)
    quick, protocol = options.quick, recipe.protocol(options, 30)
    paper = PAPER if (options.model, options.arch) == (recipe.VIT_S, "gonon") else None
    launches = names(options.launches, "--launches")
    if quick and device.type == "cuda":
        modes, launches = modes[::2], launches[:1]
    elif quick:
        modes, launches = modes[:1], [each for each in launches if each not in COMPILED]
    with recipe.start(options, device, LayerRow) as bench:
        for batch in options.batches or (recipe.images(options, device),):
            settings = LayerSettings(
                model=options.model,
                model_args=model_arguments(options.model_args),
                arch=options.arch,
                protocols=names(options.protocols, "--protocols"),
                modes=modes,
                launches=launches,
                names=names(options.parts, "--parts"),
                batch=batch,
                candidates=names(options.candidates, "--candidates"),
                rounds=protocol.rounds,
                seconds=protocol.seconds,
                seed=options.seed,
                quick=quick,
            )
            for group in bench_layers(settings, device, paper=paper, done=bench.has):
                bench.add(group, f"{group[0].protocol} {group[0].unit} {group[0].mode}")
            if training:
                for group in bench_training(settings, device, done=bench.has):
                    bench.add(group, f"training step {group[0].mode}")
    recipe.show(bench, COLUMNS)
    if options.plot is not None:
        draw(bench.records, options.plot)


def draw(records: Sequence[Record], plot: Path) -> None:
    """One picture for each mode, named after it; bars are grouped by whatever differs among its rows."""
    for mode in dict.fromkeys(record["mode"] for record in records):
        own = [record for record in records if record["mode"] == mode]
        kinds = list(dict.fromkeys(f"{record['model']}, {record['arch']}" for record in own))
        what = kinds[0] if len(kinds) == 1 else f"{len(kinds)} models"
        title = f"{what}, {mode}, {own[0]['device']}: time over dense (short black lines: the paper's)"
        group = [name for name in GROUPS if name == "unit" or len({record[name] for record in own}) > 1]
        draw_ratios(own, recipe.of_mode(plot, mode), group=group, title=title)
