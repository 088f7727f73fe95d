"""A butterfly layer beside its rivals: low rank, magnitude pruning, 2:4 sparsity, int8, fp8, lazylinop; each right, in one run.

    python recipes/rivals.py --out recipes/results/rivals_h200.csv --plot recipes/results/rivals_h200.png

The linears of a ViT-S/16 at 25088 rows. Low rank has as many weights as the butterfly. Magnitude pruning runs as a CSR product
(float32) with the butterfly's density and with others, to show at which it would cross. What is optional and not installed
(torchao, lazylinop) has a row that says so. Each is held against float64 with its own weights: what pruning and rounding do to a
model's accuracy is no part of this table.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import recipe

from flysurgery.bench import Record, RivalRow, bench_rivals, draw_lines, draw_ratios, layer_sizes, measure_ceilings
from flysurgery.bench.rivals import CSR
from flysurgery.cli.bench_show import TIMES

COLUMNS = ("layer", "mode", "candidate", "density", "launch", *TIMES)


def main() -> None:
    """Measure, print, draw."""
    parser = recipe.arguments(__doc__, modes="all", seconds=0.5)
    parser.add_argument("--arch", default="gonon")
    parser.add_argument("--width", type=recipe.count, default=384)
    recipe.add_rows(parser, 196)
    options = parser.parse_args()
    device, modes = recipe.device_and_modes(options)
    protocol = recipe.protocol(options, 30)
    count = options.rows or recipe.images(options, device) * 196
    with recipe.start(options, device, RivalRow) as run:
        for mode in modes:
            ceilings = None
            for layer, (out_features, in_features) in layer_sizes(options.width).items():
                if run.has({"layer": layer, "out_features": out_features, "rows": count, "mode": mode, "arch": options.arch}):
                    continue
                ceilings = ceilings or measure_ceilings(mode, device, quick=options.quick)
                densities = {"densities": (0.1,)} if options.quick else {}
                head = (options.arch, layer, out_features, in_features, count, mode, device, ceilings, protocol)
                run.add(bench_rivals(*head, **densities), f"{layer} {mode}")
    recipe.show(run, COLUMNS)
    for name, points in csr_points(run.records).items():
        print(f"{CSR}, {name}: {crossing(points)}")
    if options.plot is not None:
        draw(run.records, options.plot, f"{run.records[0]['device']}, {count} rows")


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


def draw(records: Sequence[Record], plot: Path, title: str) -> None:
    """Bars for each layer, CSR at the butterfly's density; in ``rivals.csr.png`` CSR at all densities."""
    own = {(record["layer"], record["mode"]): record["density"] for record in records if record["candidate"] == "butterfly"}
    bars = [each for each in records if each["candidate"] != CSR or each["density"] == own[each["layer"], each["mode"]]]
    draw_ratios(bars, plot, group=("layer", "mode"), title=title)
    lines = csr_points(records)
    if lines:
        draw_lines(lines, recipe.of_mode(plot, "csr"), across="share of the weights that is kept", up="time / time of dense", title=title)


if __name__ == "__main__":
    recipe.main(main)
