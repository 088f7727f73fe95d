"""``flysurgery bench``: how long things take here, each against dense in the same run."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flysurgery.cli import options
from flysurgery.cli.tables import print_json, print_table

if TYPE_CHECKING:
    from flysurgery.bench import MultiplyRow

app = typer.Typer(help="Measure speed: times and ratios to dense, taken in one run.", no_args_is_help=True)

LEFT = ("arch", "layer", "candidate", "status")


class Precision(str, Enum):
    """The dtypes that are measured."""

    float32 = "float32"
    float16 = "float16"
    bfloat16 = "bfloat16"


@app.callback()
def bench() -> None:
    """Measure speed: times and ratios to dense, taken in one run."""


@app.command("multiply")
def multiply(
    arch: Annotated[list[options.Family] | None, typer.Option("--arch", help="A family of architectures; repeatable.")] = None,
    width: Annotated[int, typer.Option("--width", min=1, help="Width of the transformer; the FFN is 4 times as wide.")] = 384,
    rows: Annotated[int, typer.Option("--rows", min=1, help="Rows of x, that is tokens of all images.")] = 3152,
    dtype: Annotated[Precision, typer.Option("--dtype", help="Dtype of x and the weights.")] = Precision.float32,
    device: options.Device = None,
    threads: Annotated[int | None, typer.Option("--threads", min=1, help="CPU threads; by default PyTorch's number.")] = None,
    rounds: Annotated[int, typer.Option("--rounds", min=2, help="Samples of each candidate.")] = 30,
    seed: options.Seed = 0,
    out: Annotated[Path | None, typer.Option("--out", help="Write the rows to this CSV file as well.", metavar="FILE")] = None,
    as_json: options.Json = False,
) -> None:
    """Time every backend on the layers of a transformer block."""
    import torch

    from flysurgery.bench import bench_multiply, take_stamp, to_json, write_csv
    from flysurgery.cli.progress import progress

    target = options.device_of(device)
    if threads is not None:
        torch.set_num_threads(threads)
    families = arch or [options.Family.gonon, options.Family.monarch]
    results: list[MultiplyRow] = []
    with progress("timing") as step:
        for family in families:
            measured = bench_multiply(
                family.value, width=width, rows=rows, dtype=getattr(torch, dtype.value), device=target, rounds=rounds, seed=seed
            )
            for row in measured:
                results.append(row)
                if step is not None:
                    step(len({(each.arch, each.layer) for each in results}), 3 * len(families), f"{row.arch} {row.layer}")
    stamp = take_stamp(target)
    if out is not None:
        write_csv(out, results, stamp)
    if as_json:
        print_json(to_json(results, stamp))
        return
    columns = ("arch", "layer", "candidate", "median ms", "iqr ms", "/ dense", "error", "status")
    print_table(columns, [_cells(row) for row in results], right=[column for column in columns if column not in LEFT])


def _cells(row: MultiplyRow) -> tuple[str, ...]:
    candidate = f"{row.candidate} ({row.backend})" if row.candidate == "layer" else row.candidate
    numbers = ((row.median_ms, ".3f"), (row.iqr_ms, ".3f"), (row.ratio_to_dense, ".2f"), (row.error, ".1e"))
    return (row.arch, row.layer, candidate, *("" if value is None else format(value, form) for value, form in numbers), row.status)
