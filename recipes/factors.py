"""Measure one factor by every implementation, in time and in energy, and a layer of two factors beside its rivals.

    python recipes/factors.py patterns --out build/patterns.csv --plot build/patterns.png

The tables:

    patterns  Tables 2, 4 and 7 and Figures 5, 6 and 9 to 17 of Gonon et al. 2024: one factor by every implementation, on their 627
              patterns, in both memory layouts for the implementations that have them
    energy    their Figure 7: joules of a call, read from NVML's counter of the whole device, in windows of at least a second of
              replayed graphs. bmm is measured twice, and where these two differ by more than 3 %, all rows beside them say noisy.
              ``vits.py optimized --joules`` has whole models
    rivals    the linears of a ViT-S/16 beside low rank, magnitude pruning, 2:4 sparsity, int8, fp8 and lazylinop, each held against
              float64 with its own weights: what pruning and rounding do to a model's accuracy is no part of this table. Low rank has
              as many weights as the butterfly, CSR, in both layouts, its density and others. torchao and lazylinop are optional

25088 rows. Patterns come in one shuffled order, so that a run that ends after ``--minutes`` has measured a random subset, and the next run
with the same ``--out`` goes on. What cannot be captured in a graph (bsr) is launched from Python, and its row says so. ``bound_ms`` is what
a large copy and a large matrix product, measured in the same run, allow. On a CPU --quick gives the table of energy times without joules.

Needs ``pip install 'flysurgery[bench]'``, any device, and for energy an NVIDIA GPU.
Rows: recipes/results/patterns_h200.csv, recipes/results/energy_h200.csv, recipes/results/rivals_h200.csv
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median

import energy
import recipe
from factor_cases import FACTOR_COLUMNS, compiled_ahead, factor_head, factor_rows
from paper_patterns import ROWS, draw_boxes, energy_boxes, energy_patterns, panels, shares_table, shuffled, time_patterns, wins_table
from rivals import CSR, CSR_LAST, DENSITIES, RIVAL_COLUMNS, rival_rows

from flysurgery.bench import Record
from flysurgery.bench.units import layer_sizes
from flysurgery.cli.bench import TIMES
from flysurgery.cli.tables import print_table
from flysurgery.errors import OptionError
from flysurgery.patterns import Pattern

TOKENS = ROWS // 128
QUICK_LARGEST = 1024
"""Features in and out of the patterns that --quick takes on a CPU."""


def patterns_of(options: argparse.Namespace, patterns: Sequence[Pattern], most: int | None, largest: int | None) -> list[Pattern]:
    """The first ``most`` patterns in shuffled order that have at most so many features."""
    found = [each for each in shuffled(list(patterns), options.seed) if largest is None or max(each.shape) <= largest]
    if not found:
        least = min(max(each.shape) for each in patterns)
        raise OptionError(f"--largest {largest} leaves no pattern: the smallest has {least} features")
    return found[: options.count or most]


def measure_patterns(options: argparse.Namespace) -> None:
    device, modes = recipe.device_and_modes(options)
    quickly = options.quick and device.type == "cpu"
    rows, protocol = options.rows or recipe.images(options, device) * TOKENS, recipe.protocol(options, 15)
    patterns = patterns_of(options, time_patterns(), 6 if options.quick else None, options.largest or (QUICK_LARGEST if quickly else None))

    def ahead(jobs: list[recipe.Job]) -> Iterator[recipe.Job]:
        """The jobs, each when its kernels are compiled."""
        cases = [(Pattern(*(head[name] for name in "abcd")), head["mode"]) for head, _ in jobs]
        return (job for job, _ in zip(jobs, compiled_ahead(cases, rows, device), strict=True))

    what = [(pattern, rows, mode, device) for pattern in patterns for mode in modes]
    jobs = [(factor_head(*each), partial(factor_rows, *each, protocol)) for each in what]
    shown = (*"abcd", "mode", "layout", "candidate", "launch", *TIMES) if options.quick else ()
    records = recipe.make(options, device, FACTOR_COLUMNS, jobs, shown=shown, minutes=options.minutes, order=ahead)
    titles = ("mode", "table", "claim", "holds", "median factor", "patterns", "paper (A100)")
    print_table(titles, wins_table(records, modes), right=("holds", "median factor", "patterns"))
    titles = ("mode", "share", "lower quartile", "median", "upper quartile", "patterns")
    print_table(titles, shares_table(records, modes), right=titles[2:])
    if options.plot is not None and records:
        for mode in modes:
            picture = options.plot.with_name(f"{options.plot.stem}.{mode}{options.plot.suffix}")
            draw_boxes(panels(records, mode), picture, title=f"{records[0]['device']}, {mode}, {rows} rows")


def measure_energy(options: argparse.Namespace) -> None:
    device, modes = recipe.device_and_modes(options)
    quickly = options.quick and device.type == "cpu"
    if device.type == "cpu" and not quickly:
        raise SystemExit("energy is read from an NVIDIA GPU's counter, and the device is cpu; --quick times calls without it, on few rows")
    rows, windows = options.rows or recipe.images(options, device) * TOKENS, 2 if options.quick else options.windows
    if quickly:
        measure = partial(energy.without_joules, windows=windows, seconds=0.1)
    else:
        meter = energy.EnergyMeter(device)
        measure = partial(meter.measure, windows=windows, idle_watts=meter.idle_watts())
    patterns = patterns_of(options, energy_patterns(), 2 if options.quick else 60, QUICK_LARGEST if quickly else None)
    jobs: list[recipe.Job] = [
        ({"what": str(pattern), "rows": rows, "mode": mode}, partial(energy.energy_of_factor, measure, pattern, rows, mode, device))
        for pattern in patterns
        for mode in modes
    ]
    shown = ("what", "mode", "layout", "candidate", "joules", "watts", "call_ms", "share_of_bound", "noise", "status")
    records = recipe.make(options, device, energy.ENERGY_COLUMNS, jobs, shown=shown, minutes=options.minutes)
    boxes = energy_boxes(records)
    ratios = [ratio for values in boxes.values() for ratio in values]
    if ratios:
        share = sum(ratio < 1 for ratio in ratios) / len(ratios)
        print(f"energy of cuda over the least of bmm, einsum, bsr: median {median(ratios):.2f}, below 1 on {share:.0%} of {len(ratios)}")
        print("Gonon et al. report a median of 0.85, and 72 %, on a V100")
    if options.plot is not None and records:
        panel = ("d(b+c)/(bc)", "energy of cuda / least of bmm, einsum, bsr", boxes)
        draw_boxes({"Figure 7": panel}, options.plot, title=f"{records[0]['device']}, {', '.join(modes)}")


def measure_rivals(options: argparse.Namespace) -> None:
    device, modes = recipe.device_and_modes(options)
    rows, protocol = options.rows or recipe.images(options, device) * TOKENS, recipe.protocol(options, 30)

    def jobs() -> Iterator[recipe.Job]:
        for mode in modes:
            for layer, (out_features, in_features) in layer_sizes(options.width).items():
                head = {"layer": layer, "arch": options.arch, "out_features": out_features, "in_features": in_features, "rows": rows}
                head |= {"mode": mode, "device_type": device.type}
                yield head, partial(rival_rows, head, device, protocol, (0.1,) if options.quick else DENSITIES)

    records = recipe.make(options, device, RIVAL_COLUMNS, jobs(), shown=("layer", "mode", "candidate", "density", "launch", *TIMES))
    for name, points in csr_points(records).items():
        print(f"{name}: {crossing(points)}")


def csr_points(records: Sequence[Record]) -> Mapping[str, list[tuple[float, float]]]:
    """Share of the weights that magnitude pruning keeps and time over dense, of each layout, layer and mode."""
    found: dict[str, list[tuple[float, float]]] = {}
    for record in records:
        if record["candidate"] in (CSR, CSR_LAST) and record["ratio_to_dense"]:
            point = float(record["density"]), float(record["ratio_to_dense"])
            found.setdefault(f"{record['candidate']}, {record['layer']}, {record['mode']}", []).append(point)
    return found


def crossing(points: Sequence[tuple[float, float]]) -> str:
    """Where a line of shares and ratios crosses dense."""
    least, faster = min(share for share, _ in points), [share for share, ratio in points if ratio < 1]
    return f"faster than dense at {max(faster):.3g} of the weights" if faster else f"slower than dense down to {least:.3g} of the weights"


def main() -> None:
    parser = recipe.parser_of(__doc__)
    add = recipe.tables_of(parser)
    patterns = add("patterns", measure_patterns, modes="fp32,fp16", seconds=0.05)
    energies = add("energy", measure_energy, modes="fp32")
    rivals = add("rivals", measure_rivals, modes="all", seconds=0.5)
    for command in (patterns, energies, rivals):
        command.add_argument("--rows", type=recipe.count, help=f"rows of x, {ROWS} by default: 128 images of {TOKENS} tokens")
    for command, usual in ((patterns, "all 627 by default, 6 with --quick"), (energies, "60 by default, 2 with --quick")):
        command.add_argument("--count", type=recipe.count, help=f"how many patterns in all; {usual}")
        command.add_argument("--minutes", type=recipe.duration, default=9.0, help="start no pattern after this time")
        command.add_argument("--plot", type=Path, help="draw the paper's figures into this file, or into one for each mode, named after it")
    largest_help = f"only patterns with at most this many features in and out; {QUICK_LARGEST} with --quick on a CPU"
    patterns.add_argument("--largest", type=recipe.count, help=largest_help)
    energies.add_argument("--windows", type=recipe.count, default=3, help="windows of the counter for each candidate")
    rivals.add_argument("--arch", default="gonon", help="family of architectures")
    rivals.add_argument("--width", type=recipe.count, default=384, help="features of the model")
    options = parser.parse_args()
    options.work(options)


if __name__ == "__main__":
    recipe.main(main)
