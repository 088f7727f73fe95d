"""Measure one factor by every implementation, in time and in energy, and a layer of two factors beside its rivals.

    python recipes/factors.py patterns --out build/patterns.csv --plot build/patterns.png

The tables:

    patterns  Tables 2, 4 and 7 and Figures 5, 6 and 9 to 17 of Gonon et al. 2024: one factor by every implementation, on their 627
              patterns, in both memory layouts for the implementations that have them
    energy    their Figure 7: joules of a call, for patterns and for a ViT-S/16; --optimized for that as flysurgery.optimize makes it
              too. Read from NVML's counter of the whole device, in windows of at least a second of replayed graphs. bmm and dense are
              measured twice, and where these two differ by more than 3 %, all rows beside them say noisy
    rivals    the linears of a ViT-S/16 beside low rank, magnitude pruning, 2:4 sparsity, int8, fp8 and lazylinop, each held against
              float64 with its own weights: what pruning and rounding do to a model's accuracy is no part of this table. Low rank has
              as many weights as the butterfly, CSR its density and others. torchao and lazylinop are optional

25088 rows. Patterns come in one shuffled order, so that a run that ends after ``--minutes`` has measured a random subset, and the next run
with the same ``--out`` goes on. What cannot be captured in a graph (bsr) is launched from Python, and its row says so. ``bound_ms`` is what
a large copy and a large matrix product, measured in the same run, allow. On a CPU --quick gives the table of energy times without joules.

Needs any device, and for energy an NVIDIA GPU and ``pip install 'flysurgery[bench]'``.
Rows: recipes/results/patterns_h200.csv, recipes/results/energy_h200.csv, recipes/results/rivals_h200.csv
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from statistics import median

import recipe

from flysurgery.bench import (
    EnergyMeter,
    EnergyRow,
    FactorRow,
    Meter,
    NoMeter,
    Record,
    RivalRow,
    bench_factor,
    bench_rivals,
    compiled_ahead,
    draw_boxes,
    draw_lines,
    draw_ratios,
    energy_boxes,
    energy_of_factor,
    energy_of_model,
    factor_head,
    layer_sizes,
    measure_ceilings,
    panels,
    shares_table,
    wins_table,
)
from flysurgery.bench.paper_patterns import ROWS, energy_patterns, shuffled, time_patterns
from flysurgery.bench.rivals import CSR
from flysurgery.cli.bench_run import TIMES
from flysurgery.cli.tables import print_table
from flysurgery.errors import OptionError
from flysurgery.patterns import Pattern

TOKENS = ROWS // 128
QUICK_LARGEST = 1024
"""Features in and out of the patterns that --quick takes on a CPU."""


def patterns_of(options: argparse.Namespace, patterns: Sequence[Pattern], most: int | None, largest: int | None) -> list[Pattern]:
    """The first ``most`` patterns in shuffled order that have at most so many features.

    Raises:
        OptionError: there is none.
    """
    found = [each for each in shuffled(list(patterns), options.seed) if largest is None or max(each.shape) <= largest]
    if not found:
        least = min(max(each.shape) for each in patterns)
        raise OptionError(f"--largest {largest} leaves no pattern: the smallest has {least} features")
    return found[: options.count or most]


def measure_patterns(options: argparse.Namespace) -> None:
    """Measure for as long as told; print shares of wins, median factors and shares of time."""
    device, modes = recipe.device_and_modes(options)
    quickly = options.quick and device.type == "cpu"
    rows, protocol = options.rows or recipe.images(options, device) * TOKENS, recipe.protocol(options, 15)
    patterns = patterns_of(options, time_patterns(), 6 if options.quick else None, options.largest or (QUICK_LARGEST if quickly else None))
    ceilings = cache(partial(measure_ceilings, device=device, quick=options.quick))

    def rows_of(pattern: Pattern, mode: str) -> list[FactorRow]:
        return bench_factor(pattern, rows, mode, device, ceilings(mode), protocol)

    def ahead(jobs: list[recipe.Job]) -> Iterator[recipe.Job]:
        """The jobs, each when its kernels are compiled."""
        return (job for job, _ in zip(jobs, compiled_ahead([work.args for _, work in jobs], rows, device), strict=True))

    cases = [(pattern, mode) for pattern in patterns for mode in modes]
    jobs = [(factor_head(pattern, rows, mode, device), partial(rows_of, pattern, mode)) for pattern, mode in cases]
    columns = ("a", "b", "c", "d", "mode", "layout", "candidate", "launch", *TIMES) if options.quick else None
    records = recipe.make(options, device, FactorRow, jobs, columns, minutes=options.minutes, order=ahead)
    titles = ("mode", "table", "claim", "holds", "median factor", "patterns", "paper (A100)")
    print_table(titles, wins_table(records, modes), right=("holds", "median factor", "patterns"))
    titles = ("mode", "share", "lower quartile", "median", "upper quartile", "patterns")
    print_table(titles, shares_table(records, modes), right=titles[2:])
    if options.plot is not None and records:
        for mode in modes:
            title = f"{records[0]['device']}, {mode}, {rows} rows"
            draw_boxes(panels(records, mode), recipe.of_mode(options.plot, mode), title=title)


def measure_energy(options: argparse.Namespace) -> None:
    """Measure the model, and patterns for as long as told."""
    device, modes = recipe.device_and_modes(options)
    quickly = options.quick and device.type == "cpu"
    if device.type == "cpu" and not quickly:
        raise SystemExit("energy is read from an NVIDIA GPU's counter, and the device is cpu; --quick times calls without it, on few rows")
    meter: Meter = NoMeter() if quickly else EnergyMeter(device)
    rows, batch = options.rows or recipe.images(options, device) * TOKENS, options.batch or recipe.images(options, device)
    how = {"seconds": 0.1 if quickly else 1.0, "windows": 2 if options.quick else options.windows, "idle_watts": meter.idle_watts()}
    patterns = patterns_of(options, energy_patterns(), 2 if options.quick else 60, QUICK_LARGEST if quickly else None)
    ceilings = cache(partial(measure_ceilings, device=device, quick=options.quick))
    candidates = ("dense", "layer", "bmm", *(("dense, optimized", "layer, optimized") if options.optimized else ()))

    def of_model(mode: str) -> list[EnergyRow]:
        what = options.model, {}, "gonon", batch
        return energy_of_model(meter, *what, mode, device, ceilings(mode), candidates=candidates, **how)

    def of_factor(pattern: Pattern, mode: str) -> list[EnergyRow]:
        return energy_of_factor(meter, pattern, rows, mode, device, ceilings(mode), **how)

    # The last candidate stands for all: a file that lacks only the optimized ones gets the model's rows again.
    models = [
        ({"what": options.model, "rows": batch, "mode": mode, "candidate": candidates[-1]}, partial(of_model, mode)) for mode in modes
    ]
    factors = [
        ({"what": str(pattern), "rows": rows, "mode": mode}, partial(of_factor, pattern, mode)) for pattern in patterns for mode in modes
    ]
    seen = ("what", "mode", "layout", "candidate", "joules", "above_idle_joules", "watts", "idle_watts", "call_ms", "share_of_bound")
    records = recipe.make(options, device, EnergyRow, [*models, *factors], (*seen, "noise", "status"), minutes=options.minutes)
    boxes, ratios = energy_boxes(records)
    if ratios:
        share = sum(ratio < 1 for ratio in ratios) / len(ratios)
        print(f"energy of cuda over the least of bmm, einsum, bsr: median {median(ratios):.2f}, below 1 on {share:.0%} of {len(ratios)}")
        print("Gonon et al. report a median of 0.85, and 72 %, on a V100")
    if options.plot is not None and records:
        panel = ("d(b+c)/(bc)", "energy of cuda / least of bmm, einsum, bsr", boxes)
        draw_boxes({"Figure 7": panel}, options.plot, title=f"{records[0]['device']}, {', '.join(modes)}")


def measure_rivals(options: argparse.Namespace) -> None:
    """Measure the layers; say where pruning crosses dense."""
    device, modes = recipe.device_and_modes(options)
    rows, protocol = options.rows or recipe.images(options, device) * TOKENS, recipe.protocol(options, 30)
    ceilings = cache(partial(measure_ceilings, device=device, quick=options.quick))
    densities = {"densities": (0.1,)} if options.quick else {}

    def rows_of(layer: str, out_features: int, in_features: int, mode: str) -> list[RivalRow]:
        head = options.arch, layer, out_features, in_features, rows, mode, device
        return bench_rivals(*head, ceilings(mode), protocol, **densities)

    jobs = [
        (
            {"layer": layer, "out_features": sizes[0], "rows": rows, "mode": mode, "arch": options.arch},
            partial(rows_of, layer, *sizes, mode),
        )
        for mode in modes
        for layer, sizes in layer_sizes(options.width).items()
    ]
    records = recipe.make(options, device, RivalRow, jobs, ("layer", "mode", "candidate", "density", "launch", *TIMES))
    lines = csr_points(records)
    for name, points in lines.items():
        print(f"{CSR}, {name}: {crossing(points)}")
    if options.plot is not None:
        draw_rivals(records, lines, options.plot, f"{records[0]['device']}, {rows} rows")


def csr_points(records: Sequence[Record]) -> dict[str, list[tuple[float, float]]]:
    """Share of the weights that magnitude pruning keeps and time over dense, of each layer and mode."""
    found: dict[str, list[tuple[float, float]]] = {}
    for record in records:
        if record["candidate"] == CSR and record["ratio_to_dense"]:
            point = float(record["density"]), float(record["ratio_to_dense"])
            found.setdefault(f"{record['layer']}, {record['mode']}", []).append(point)
    return found


def crossing(points: Sequence[tuple[float, float]]) -> str:
    """Where a line of shares and ratios crosses dense."""
    least, faster = min(share for share, _ in points), [share for share, ratio in points if ratio < 1]
    return f"faster than dense at {max(faster):.3g} of the weights" if faster else f"slower than dense down to {least:.3g} of the weights"


def draw_rivals(records: Sequence[Record], lines: Mapping[str, list[tuple[float, float]]], plot: Path, title: str) -> None:
    """Bars for each layer, CSR at the butterfly's density; in ``rivals.csr.png`` CSR at all densities."""
    own = {(record["layer"], record["mode"]): record["density"] for record in records if record["candidate"] == "butterfly"}
    bars = [each for each in records if each["candidate"] != CSR or each["density"] == own[each["layer"], each["mode"]]]
    draw_ratios(bars, plot, group=("layer", "mode"), title=title)
    if lines:
        draw_lines(lines, recipe.of_mode(plot, "csr"), across="share of the weights that is kept", up="time / time of dense", title=title)


def main() -> None:
    """Measure, print, write and draw."""
    parser = recipe.parser_of(__doc__)
    commands = parser.add_subparsers(dest="table", metavar="TABLE", required=True)
    patterns, energy, rivals = (commands.add_parser(name, **recipe.as_it_stands(__doc__)) for name in ("patterns", "energy", "rivals"))
    recipe.add_options(patterns, modes="fp32,fp16", seconds=0.05)
    recipe.add_options(energy, modes="fp32")
    recipe.add_options(rivals, modes="all", seconds=0.5)
    for command in (patterns, energy, rivals):
        command.add_argument("--rows", type=recipe.count, help=f"rows of x, {ROWS} by default: 128 images of {TOKENS} tokens")
    for command, usual in ((patterns, "all 627 by default, 6 with --quick"), (energy, "60 by default, 2 with --quick")):
        command.add_argument("--count", type=recipe.count, help=f"how many patterns in all; {usual}")
        command.add_argument("--minutes", type=recipe.duration, default=9.0, help="start no pattern after this time")
    largest_help = f"only patterns with at most this many features in and out; {QUICK_LARGEST} with --quick on a CPU"
    patterns.add_argument("--largest", type=recipe.count, help=largest_help)
    energy.add_argument("--windows", type=recipe.count, default=3, help="windows of the counter for each candidate")
    energy.add_argument("--model", default=recipe.VIT_S, help="a ViT of timm")
    energy.add_argument("--batch", type=recipe.count, help="images a forward, 128 by default")
    energy.add_argument("--optimized", action="store_true", help="the model as flysurgery.optimize makes it too, and dense optimized")
    rivals.add_argument("--arch", default="gonon", help="family of architectures")
    rivals.add_argument("--width", type=recipe.count, default=384, help="features of the model")
    for command, work in ((patterns, measure_patterns), (energy, measure_energy), (rivals, measure_rivals)):
        command.set_defaults(work=work)
    options = parser.parse_args()
    options.work(options)


if __name__ == "__main__":
    recipe.main(main)
