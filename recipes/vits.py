"""Time Vision Transformers and their parts, converted beside dense: Tables 3, 5 and 6 of Gonon et al. 2024 and further ones.

    python recipes/vits.py table3 --out build/vits.csv
    python recipes/vits.py optimized --headline --out build/optimized_vits.csv    # two minutes

The tables:

    table3     parts of a ViT-S/16 at batch 128, in float32 to bfloat16. --batches and --model go further
    table6     its linear layers with and without bias
    cpu        parts of a ViT-S/16 on two threads of a CPU at batch 16, also beside int8 (dynamic quantization, float32 only). Nothing
               else may run meanwhile
    table5     what part of a dense model's time the linears of its feed-forward networks take, one after the other with nothing between
               them. More than this a faster feed-forward linear cannot win
    optimized  models as flysurgery.optimize makes them, beside dense, compiled and converted ones. --headline has the main ratios and
               joules. "dense optimized" is what fusion gives without any structure
    training   a training step (forward, backward, fused AdamW, bfloat16 autocast), called from Python one by one, also through
               torch.compile, and ten in a row, and as a CUDA graph. Errors are those of a gradient

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
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial

import recipe
import vit_models
from vit_parts import COMPILED, FUSED, INT8, part_case, share_case

from flysurgery.bench import rows_of_case
from flysurgery.bench.measuring import MEASURED
from flysurgery.bench.units import PROTOCOLS, layer_sizes, model_name, units, vit_sizes
from flysurgery.cli.bench import TIMES
from flysurgery.cli.options import model_arguments, names
from flysurgery.errors import OptionError
from flysurgery.patterns import named

CANDIDATES = ("dense", "layer", "two launches", FUSED, "bmm", "einsum", "bsr")
LAUNCHES = ("graph", "eager", *COMPILED)
PART_HEAD = ("model", "arch", "protocol", "unit", "batch", "mode", "device_type", "compiled")
PART_COLUMNS = (*PART_HEAD, "candidate", "backend", "paper_ratio", *MEASURED)
SHARE_COLUMNS = ("model", "batch", "mode", "device_type", "candidate", "paper_ratio", *MEASURED)


@dataclass(frozen=True)
class Parts:
    """A table of parts of a model: the defaults of its options. ``batch`` counts images, ``rounds`` samples of a candidate at most."""

    parts: str
    launches: tuple[str, ...]
    archs: str = "gonon"
    batch: int = 128
    modes: str = "all"
    seconds: float = 0.5
    rounds: int = 30
    candidates: tuple[str, ...] = CANDIDATES
    device: str | None = None
    threads: int | None = None


PARTS: Mapping[str, Parts] = {
    "table3": Parts("linear N x N,FFN,attention,block,model", LAUNCHES),
    "table6": Parts("linear*,qkv*", ("graph", "eager")),
    "cpu": Parts(
        *("*", ("eager", "compile"), "gonon,monarch", 16, "fp32,bf16", 3.0, 15),
        *(("dense", "layer", "bmm", "einsum", INT8), "cpu", 2),
    ),
}

PAPER = {
    "linear N x N": (0.82, 0.50),
    "linear N x N + bias": (0.97, 0.66),
    "linear 4N x N": (0.80, 0.78),
    "linear 4N x N + bias": (0.93, 0.90),
    "linear N x 4N": (0.91, 0.58),
    "linear N x 4N + bias": (0.94, 0.61),
    "FFN": (0.91, 0.77),
    "attention": (0.87, 0.79),
    "block": (0.90, 0.78),
    "model": (0.89, 0.78),
}
"""Time over dense of bmm and of their kernel in Tables 3 and 6 of Gonon et al. 2024 (A100, float32); theirs stands beside our layer."""

PAPER_SHARES = {
    "vit_small_patch16_224": {"fp16": 0.31, "fp32": 0.46},
    "vit_base_patch16_224": {"fp16": 0.42, "fp32": 0.54},
    "vit_large_patch16_224": {"fp16": 0.46, "fp32": 0.58},
    "vit_huge_patch14_224": {"fp16": 0.53, "fp32": 0.61},
}
"""Shares in Table 5 of Gonon et al. 2024."""


def measure_parts(options: argparse.Namespace) -> None:
    shown = ("arch", "protocol", "unit", "batch", "mode", "launch", "compiled", "candidate", "backend", "paper_ratio", *TIMES)
    recipe.make(options, recipe.device_and_modes(options)[0], PART_COLUMNS, part_jobs(options), shown=shown)


def part_jobs(options: argparse.Namespace) -> Iterator[recipe.Job]:
    """The parts to measure, by architecture, batch, mode, protocol and launch."""
    table = PARTS[options.table]
    device, modes = recipe.device_and_modes(options)
    on_cuda = device.type == "cuda"
    archs, model_args = names(options.archs, "--archs"), model_arguments(options.model_args)
    launches = [launch for launch in options.launches if on_cuda or launch != "graph"]
    candidates = options.candidates
    if options.quick:
        archs, modes = archs[:1], modes[::2] if on_cuda else modes[:1]
        launches = launches[:1] if on_cuda else [launch for launch in launches if launch not in COMPILED]
        candidates = tuple(name for name in candidates if on_cuda or name != "bsr")  # it takes tens of times as long as the others
    for arch in archs:
        for sizes in layer_sizes(vit_sizes(options.model, model_args)[0].width).values():
            named(arch, *sizes)
        parts = {each: units(each, options.model, model_args, arch, options.seed) for each in PROTOCOLS}
        known = {part.name for protocol in parts.values() for part in protocol}
        wanted = names(options.parts, "--parts")
        for name in wanted:
            if not any(fnmatchcase(each, name) for each in known):
                raise OptionError(f"no part of {options.model} is called {name}; the parts are {', '.join(sorted(known))}")
        paper = PAPER if (options.model, arch) == (recipe.VIT_S, "gonon") else {}
        chosen = [
            (batch, mode, protocol, unit, launch)
            for batch in options.batches or (recipe.images(options, device, table.batch),)
            for mode in modes
            for protocol in options.protocols
            for unit in parts[protocol]
            for launch in launches
            if any(fnmatchcase(unit.name, name) for name in wanted) and (protocol == "today" or launch not in COMPILED)
        ]
        for batch, mode, protocol, unit, launch in chosen:
            head = {"model": model_name(options.model, model_args), "arch": arch, "protocol": protocol, "unit": unit.name, "batch": batch}
            head |= {"mode": mode, "device_type": device.type, "compiled": launch if launch in COMPILED else ""}
            how = replace(recipe.protocol(options, table.rounds), launch="eager" if launch in COMPILED else launch)
            ratios: dict[str, float] = dict(zip(("bmm", "layer"), paper.get(unit.name, ()), strict=False))
            make = partial(part_case, unit, batch, mode, launch, candidates, device, ratios)
            # The first candidate stands for all: others may have been launched otherwise, where they cannot be captured.
            yield head | {"launch": how.launch, "candidate": candidates[0]}, partial(rows_of_case, head, make, mode, how)


def measure_shares(options: argparse.Namespace) -> None:
    device, modes = recipe.device_and_modes(options)
    models, arguments = recipe.few(options, names(options.models, "--models")), model_arguments(options.model_args)
    modes = modes[-1:] if options.quick and device.type != "cuda" else modes
    batch, how = options.batch or recipe.images(options, device), recipe.protocol(options, 30)

    def jobs() -> Iterator[recipe.Job]:
        for model in models:
            for mode in modes:
                head = {"model": model_name(model, arguments), "batch": batch, "mode": mode, "device_type": device.type}
                paper = None if arguments else PAPER_SHARES.get(model, {}).get(mode)
                make = partial(share_case, model, arguments, batch, mode, device, paper)
                yield head, partial(rows_of_case, head, make, mode, how)

    recipe.make(options, device, SHARE_COLUMNS, jobs(), shown=("model", "batch", "mode", "launch", "candidate", "paper_ratio", *TIMES))


def main() -> None:
    parser = recipe.parser_of(__doc__)
    add = recipe.tables_of(parser)
    for name, table in PARTS.items():
        command = add(name, measure_parts, modes=table.modes, seconds=table.seconds)
        command.set_defaults(device=table.device, threads=table.threads)
        command.add_argument("--model", default=recipe.VIT_S, help="a ViT of timm: vit_base_patch16_224, vit_large_patch16_224, ...")
        command.add_argument("--model-args", action="append", metavar="KEY=VALUE", help="arguments of its constructor; repeatable")
        command.add_argument("--protocols", type=recipe.some_of(*PROTOCOLS), default=PROTOCOLS, help="out of paper, today")
        archs_help = "out of gonon (widths that are multiples of 24), monarch, lowrank"
        command.add_argument("--archs", default=table.archs, help=archs_help)
        command.add_argument("--batches", type=recipe.counts, help=f"images a forward, such as 1,8; {table.batch} by default")
        command.add_argument("--parts", default=table.parts, help="names of parts; linear* are all linears")
        known = recipe.some_of(*CANDIDATES, INT8)
        command.add_argument("--candidates", type=known, default=table.candidates, help=f"out of {', '.join(CANDIDATES)}, {INT8}")
        launches_help = f"out of {', '.join(LAUNCHES)}; the compiler's for today's protocol only"
        command.add_argument("--launches", type=recipe.some_of(*LAUNCHES), default=table.launches, help=launches_help)
    shares = add("table5", measure_shares, modes="fp16,fp32", seconds=0.5)
    shares.add_argument("--models", default=",".join(PAPER_SHARES), help="ViTs of timm; with --quick the first")
    shares.add_argument("--model-args", action="append", metavar="KEY=VALUE", help="arguments of their constructor; repeatable")
    shares.add_argument("--batch", type=recipe.count, help="images a forward; 128 by default")
    whole = add("optimized", vit_models.measure_optimized, modes="fp16,bf16,tf32,fp32", seconds=2.0)
    whole.add_argument("--headline", action="store_true", help="ViT-S/16 at batch 128, with joules, and 1, and ViT-B/16; fp16")
    whole.add_argument("--joules", action="store_true", help="measure the joules of all models")
    whole.add_argument("--model", default=recipe.VIT_S, help="a ViT of timm")
    whole.add_argument("--archs", default="gonon,monarch", help="families of architectures")
    whole.add_argument("--batches", type=recipe.counts, help="images a forward; 128,1 by default")
    training = add("training", vit_models.measure_training, modes="bf16", seconds=2.0)
    training.add_argument("--model", default=recipe.VIT_S, help="a ViT of timm")
    training.add_argument("--arch", default="gonon", help="monarch or gonon")
    training.add_argument("--batch", type=recipe.count, help="images a forward, 128 by default")
    options = parser.parse_args()
    options.work(options)


if __name__ == "__main__":
    recipe.main(main)
