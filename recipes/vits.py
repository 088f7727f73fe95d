"""Time Vision Transformers and their parts, converted beside dense: Tables 3, 5 and 6 of Gonon et al. 2024 and further ones.

    python recipes/vits.py table3 --out build/vits.csv --plot build/vit_s16_table3.png
    python recipes/vits.py optimized --headline --out build/optimized_vits.csv    # two minutes

The tables:

    table3     parts of a ViT-S/16 at batch 128, in float32 to bfloat16. --batches and --model go further, --training adds a training step
    table6     its linear layers with and without bias
    cpu        parts of a ViT-S/16 on two threads of a CPU at batch 16, also beside int8 (dynamic quantization, float32 only). Nothing
               else may run meanwhile
    table5     what part of a dense model's time the linears of its feed-forward networks take, one after the other with nothing between
               them. More than this a faster feed-forward linear cannot win
    optimized  models as flysurgery.optimize makes them, beside dense, compiled and converted ones. --headline has the main ratios and
               joules. "dense optimized" is what fusion gives without any structure
    training   a training step (forward, backward, fused AdamW, bfloat16 autocast), called from Python one by one and ten in a row, and
               as a CUDA graph. Errors are those of a gradient

Random weights: no time depends on their values. Protocol ``paper``: separate q, k and v, attention written out, no compiler. Protocol
``today``: timm's model, one qkv, ``scaled_dot_product_attention``, also through ``torch.compile``. Each ratio is to dense in the same run
and mode; ``paper_ratio`` is what the authors report on an A100 in float32. CUDA graphs run over inputs larger than the L2 cache. Errors
are those of the outputs against float64; a candidate that is wrong gets no time. ``bound_ms`` is what a large copy and a large matrix
product, measured in the same run, allow. Joules are those of a batch, from NVML's counter over windows of a second of replayed graphs.

Needs any device; optimized and training a CUDA device, cpu a quiet CPU and half an hour.
Rows: recipes/results/vits.csv, recipes/results/optimized_vits.csv, recipes/results/training_h200.csv
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import recipe
import vit_models

from flysurgery.bench import (
    CANDIDATES,
    LAUNCHES,
    LayerRow,
    LayerSettings,
    Record,
    ShareRow,
    bench_ffn_share,
    bench_layers,
    bench_training,
    draw_ratios,
    measure_ceilings,
    share_head,
)
from flysurgery.bench.variants import COMPILED
from flysurgery.cli.bench_run import TIMES, BenchRun, print_records
from flysurgery.cli.options import model_arguments, names


@dataclass(frozen=True)
class Parts:
    """A table of parts of a model: the defaults of its options. ``batch`` counts images, ``rounds`` samples of a candidate at most."""

    parts: str
    launches: str
    archs: str = "gonon"
    batch: int = 128
    modes: str = "all"
    seconds: float = 0.5
    rounds: int = 30
    candidates: Sequence[str] = CANDIDATES
    device: str | None = None
    threads: int | None = None


PARTS: Mapping[str, Parts] = {
    "table3": Parts("linear N x N,FFN,attention,block,model", "graph,eager,compile,max-autotune"),
    "table6": Parts("linear*,qkv*", "graph,eager"),
    "cpu": Parts(
        *("*", "eager,compile", "gonon,monarch", 16, "fp32,bf16", 3.0, 15),
        *(("dense", "layer", "bmm", "einsum", "int8 dynamic"), "cpu", 2),
    ),
}

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

PAPER_SHARES = {
    "vit_small_patch16_224": {"fp16": 0.31, "fp32": 0.46},
    "vit_base_patch16_224": {"fp16": 0.42, "fp32": 0.54},
    "vit_large_patch16_224": {"fp16": 0.46, "fp32": 0.58},
    "vit_huge_patch14_224": {"fp16": 0.53, "fp32": 0.61},
}
"""Shares in Table 5 of Gonon et al. 2024."""

GROUPS = ("model", "arch", "batch", "protocol", "unit", "launch", "compiled")


def measure_parts(options: argparse.Namespace) -> None:
    """Tables 3 and 6, and those of a CPU."""
    table = PARTS[options.table]
    device, modes = recipe.device_and_modes(options)
    archs, launches = names(options.archs, "--archs"), names(options.launches, "--launches")
    if options.quick:
        archs = archs[:1]
        modes = modes[::2] if device.type == "cuda" else modes[:1]
        launches = launches[:1] if device.type == "cuda" else tuple(each for each in launches if each not in COMPILED)
    protocol = recipe.protocol(options, table.rounds)
    cases = [(arch, batch) for arch in archs for batch in options.batches or (recipe.images(options, device, table.batch),)]
    with BenchRun(device, LayerRow, options.out, fresh=options.fresh, plot=options.plot) as run:
        for arch, batch in cases:
            settings = LayerSettings(
                model=options.model,
                model_args=model_arguments(options.model_args),
                arch=arch,
                protocols=names(options.protocols, "--protocols"),
                modes=modes,
                launches=launches,
                candidates=names(options.candidates, "--candidates"),
                names=names(options.parts, "--parts"),
                batch=batch,
                rounds=protocol.rounds,
                seconds=protocol.seconds,
                seed=options.seed,
                quick=options.quick,
            )
            paper = PAPER if (options.model, arch) == (recipe.VIT_S, "gonon") else None
            for group in bench_layers(settings, device, paper=paper, done=run.has):
                run.add(group, f"{arch} {group[0].protocol} {group[0].unit} {group[0].mode}")
            for group in bench_training(settings, device, done=run.has) if options.training else ():
                run.add(group, f"{arch} training step {group[0].mode}")
    print_records(
        run.records, ("arch", "protocol", "unit", "batch", "mode", "launch", "compiled", "candidate", "backend", "paper_ratio", *TIMES)
    )
    if options.plot is not None:
        draw_parts(run.records, options.plot)


def draw_parts(records: Sequence[Record], plot: Path) -> None:
    """One picture for each mode, named after it; bars are grouped by whatever differs among its rows."""
    for mode in dict.fromkeys(record["mode"] for record in records):
        own = [record for record in records if record["mode"] == mode]
        kinds = list(dict.fromkeys(f"{record['model']}, {record['arch']}" for record in own))
        what = kinds[0] if len(kinds) == 1 else f"{len(kinds)} models"
        title = f"{what}, {mode}, {own[0]['device']}: time over dense (short black lines: the paper's)"
        group = [name for name in GROUPS if name == "unit" or len({record[name] for record in own}) > 1]
        draw_ratios(own, recipe.of_mode(plot, mode), group=group, title=title)


def measure_shares(options: argparse.Namespace) -> None:
    """Table 5."""
    device, modes = recipe.device_and_modes(options)
    models, arguments = names(options.models, "--models"), model_arguments(options.model_args)
    if options.quick:
        models, modes = models[:1], modes if device.type == "cuda" else modes[-1:]
    batch, protocol = options.batch or recipe.images(options, device), recipe.protocol(options, 30)
    ceilings = cache(partial(measure_ceilings, device=device, quick=options.quick))

    def rows_of(model: str, mode: str) -> list[ShareRow]:
        paper = None if arguments else PAPER_SHARES.get(model, {}).get(mode)
        return bench_ffn_share(model, arguments, batch, mode, device, ceilings(mode), protocol, paper=paper)

    heads = {(model, mode): share_head(model, arguments, batch, mode, device) for model in models for mode in modes}
    jobs = [(head, partial(rows_of, *case)) for case, head in heads.items()]
    records = recipe.make(options, device, ShareRow, jobs, ("model", "batch", "mode", "launch", "candidate", "paper_ratio", *TIMES))
    if options.plot is not None and records:
        title = f"{records[0]['device']}: linears of feed-forward networks (short black lines: the paper's)"
        draw_ratios(records, options.plot, group=("model", "mode"), title=title)


def main() -> None:
    """Measure, print, write and draw."""
    parser = recipe.parser_of(__doc__)
    commands = parser.add_subparsers(dest="table", metavar="TABLE", required=True)

    def add(name: str, modes: str, seconds: float) -> argparse.ArgumentParser:
        command = commands.add_parser(name, **recipe.as_it_stands(__doc__))
        recipe.add_options(command, modes=modes, seconds=seconds)
        return command

    for name, table in PARTS.items():
        command = add(name, table.modes, table.seconds)
        command.set_defaults(device=table.device, threads=table.threads, work=measure_parts)
        command.add_argument("--model", default=recipe.VIT_S, help="a ViT of timm: vit_base_patch16_224, vit_large_patch16_224, ...")
        command.add_argument("--model-args", action="append", metavar="KEY=VALUE", help="arguments of its constructor; repeatable")
        command.add_argument("--protocols", default="paper,today", help="out of paper, today")
        archs_help = "out of gonon (widths that are multiples of 24), monarch, lowrank"
        command.add_argument("--archs", default=table.archs, help=archs_help)
        command.add_argument("--batches", type=recipe.counts, help=f"images a forward, such as 1,8; {table.batch} by default")
        command.add_argument("--parts", default=table.parts, help="names of parts; linear* are all linears")
        command.add_argument("--candidates", default=",".join(table.candidates), help=f"out of {', '.join(CANDIDATES)}, int8 dynamic")
        launches_help = f"out of {', '.join(LAUNCHES)}; the compiler's for today's protocol only"
        command.add_argument("--launches", default=table.launches, help=launches_help)
        command.add_argument("--training", action="store_true", help="time a training step of the whole model as well")
    shares = add("table5", "fp16,fp32", 0.5)
    shares.set_defaults(work=measure_shares)
    shares.add_argument("--models", default=",".join(PAPER_SHARES), help="ViTs of timm; with --quick the first")
    shares.add_argument("--model-args", action="append", metavar="KEY=VALUE", help="arguments of their constructor; repeatable")
    shares.add_argument("--batch", type=recipe.count, help="images a forward; 128 by default")
    whole = add("optimized", "fp16,bf16,tf32,fp32", 2.0)
    whole.set_defaults(work=vit_models.measure_optimized)
    whole.add_argument("--headline", action="store_true", help="ViT-S/16 at batch 128, with joules, and 1, and ViT-B/16; fp16")
    whole.add_argument("--model", default=recipe.VIT_S, help="a ViT of timm")
    whole.add_argument("--archs", default="gonon,monarch", help="families of architectures")
    whole.add_argument("--batches", type=recipe.counts, help="images a forward; 128,1 by default")
    training = add("training", "bf16", 2.0)
    training.set_defaults(work=vit_models.measure_training)
    training.add_argument("--model", default=recipe.VIT_S, help="a ViT of timm")
    training.add_argument("--arch", default="gonon", help="monarch or gonon")
    training.add_argument("--batch", type=recipe.count, help="images a forward, 128 by default")
    options = parser.parse_args()
    options.work(options)


if __name__ == "__main__":
    recipe.main(main)
