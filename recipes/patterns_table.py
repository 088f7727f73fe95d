"""Tables 2, 4 and 7 and Figures 5, 6 and 9 to 17 of Gonon et al. 2024: one factor by every implementation, on their patterns.

    python recipes/patterns_table.py --out recipes/results/patterns_h200.csv --plot recipes/results/patterns_h200.png

25088 rows, float32 and float16 if not told otherwise, both memory layouts for the implementations that have them; for each mode a picture
of its own (``patterns_h200.fp32.png``). The 627 patterns come in one shuffled order, so that a run that ends after ``--minutes`` has
measured a random subset, and the next run with the same ``--out`` goes on. Without a graph (bsr) a time is that of single
launches, and its row says so.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import recipe
import torch

from flysurgery.bench import (
    FactorRow,
    Record,
    bench_factor,
    compiled_ahead,
    draw_boxes,
    factor_head,
    measure_ceilings,
    panels,
    shares_table,
    wins_table,
)
from flysurgery.bench.paper_patterns import ROWS, shuffled, time_patterns
from flysurgery.cli.bench_show import TIMES, print_records
from flysurgery.cli.tables import print_table
from flysurgery.errors import OptionError

TOKENS = ROWS // 128
QUICK_LARGEST = 1024
COLUMNS = ("a", "b", "c", "d", "mode", "layout", "candidate", "launch", *TIMES)


def main() -> None:
    """Measure for as long as told, print shares of wins, median factors and shares of time, draw."""
    parser = recipe.arguments(__doc__, modes="fp32,fp16", seconds=0.05)
    recipe.add_patterns(parser, "all 627 by default, 6 with --quick")
    largest_help = f"only patterns with at most this many features in and out; {QUICK_LARGEST} with --quick on a CPU"
    parser.add_argument("--largest", type=recipe.count, help=largest_help)
    options = parser.parse_args()
    device, modes = recipe.device_and_modes(options)
    rows = options.rows or recipe.images(options, device) * TOKENS
    end = time.monotonic() + 60 * options.minutes
    patterns = shuffled(time_patterns(), options.seed)
    largest = options.largest or (QUICK_LARGEST if options.quick and device.type == "cpu" else None)
    if largest is not None:
        least = min(max(each.shape) for each in patterns)
        patterns = [each for each in patterns if max(each.shape) <= largest]
        if not patterns:
            raise OptionError(f"--largest {largest} leaves no pattern: the smallest has {least} features")
    patterns = patterns[: options.count or (6 if options.quick else len(patterns))]
    protocol = recipe.protocol(options, 15)
    with recipe.start(options, device, FactorRow) as run:
        todo = [(each, mode) for each in patterns for mode in modes if not run.has(factor_head(each, rows, mode, device))]
        ceilings = {}
        for done, (pattern, mode) in enumerate(compiled_ahead(todo, rows, device)):
            if time.monotonic() > end:
                print(f"{len(todo) - done} of {len(todo)} measurements are left for the next run", flush=True)
                break
            if mode not in ceilings:
                ceilings[mode] = measure_ceilings(mode, device, quick=options.quick)
            try:
                run.add(bench_factor(pattern, rows, mode, device, ceilings[mode], protocol), f"{pattern} {mode}")
            except torch.OutOfMemoryError:
                torch.cuda.empty_cache()
                print(f"{pattern} in {mode} does not fit into this device's memory, and has no rows", flush=True)
    if options.quick:
        print_records(run.records, COLUMNS)
    titles = ("mode", "table", "claim", "holds", "median factor", "patterns", "paper (A100)")
    print_table(titles, wins_table(run.records, modes), right=("holds", "median factor", "patterns"))
    titles = ("mode", "share", "lower quartile", "median", "upper quartile", "patterns")
    print_table(titles, shares_table(run.records, modes), right=titles[2:])
    if options.plot is not None and run.records:
        draw(run.records, modes, options.plot, rows)


def draw(records: Sequence[Record], modes: Sequence[str], plot: Path, rows: int) -> None:
    """One picture for each mode, named after it."""
    for mode in modes:
        title = f"{records[0]['device']}, {mode}, {rows} rows"
        draw_boxes(panels(records, mode), recipe.of_mode(plot, mode), title=title)


if __name__ == "__main__":
    recipe.main(main)
