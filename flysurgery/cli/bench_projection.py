"""``flysurgery bench projection``: how long a projection takes, and how near it comes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from statistics import fmean

import torch

from flysurgery.cli import bench_options as own
from flysurgery.cli import options
from flysurgery.cli.bench_run import BenchRun
from flysurgery.cli.bench_show import print_records

COLUMNS = ("arch", "layer", "out_features", "in_features", "density", "matrix", "seconds", "relative_error", "status")


def projection(
    arch: own.Families = None,
    width: own.Width = 384,
    threads: own.Threads = None,
    seed: options.Seed = 0,
    quick: own.Quick = False,
    out: own.Out = None,
    fresh: own.Fresh = False,
    plot: own.Plot = None,
    as_json: options.Json = False,
) -> None:
    """Time the projection of the layers of a transformer block onto each family of architectures."""
    from flysurgery.bench import ProjectionRow, bench_projection, draw_lines

    own.prepare("cpu", threads)
    families = [each.value for each in arch or options.Family]
    with BenchRun(torch.device("cpu"), ProjectionRow, out, fresh=fresh, plot=plot) as run:
        for family in families:
            for group in bench_projection(family, width=width, runs=1 if quick else 3, seed=seed, done=run.has):
                run.add(group, f"{family} {group[0].layer}")
    if plot is not None:
        _draw(run.records, plot, draw_lines)
    if as_json:
        run.print_json()
    else:
        print_records(run.records, COLUMNS)


def _draw(records: list[dict[str, str]], plot: Path, draw: Callable[..., None]) -> None:
    """A line for each family and kind of matrix; layers of one size, as up and down, are one point, their mean."""
    times: dict[str, dict[int, list[float]]] = {}
    for each in records:
        if each["seconds"]:
            weights = int(each["out_features"]) * int(each["in_features"])
            times.setdefault(f"{each['arch']}, {each['matrix']}", {}).setdefault(weights, []).append(float(each["seconds"]))
    series = {name: [(weights, fmean(own)) for weights, own in points.items()] for name, points in times.items()}
    draw(series, plot, across="weights of the dense matrix", up="seconds", level=None)
