"""Time kernels, and the parts of a block that they compute, beside PyTorch's own.

    python recipes/kernel_tables.py attention --out build/kernels.csv

The tables:

    attention       attention of halves in short sequences, for the sizes of timm's models, beside PyTorch's backends
    norm_linear     a norm with q, k and v of a ViT-S/16 in one launch, beside two launches, dense and compiled
    fused_linear    the layers of a ViT-S/16 block as single launches, beside dense, bmm, einsum and a copy of as many bytes
    factor_gradients  the gradients of a layer's factors, for the layers of a ViT-S/16 block, beside einsum
    fused_ffn       feed-forward blocks with norm and residual, beside separate operators, dense and compiled
    few_rows        the parts of a block for 1 to 8 images, dense and converted
    gated_ffn       gated feed-forward blocks (SwiGLU) of timm's eva02 and giant DINOv2 models, dense and converted
    wide            wide layers factor by factor, beside a launch a layer, for few rows and many, in fp16
    fused_ablation  the fused linear kernel with one technique taken out at a time, beside two launches and einsum

``fused`` is what ``flysurgery.ops`` chooses, ``dense`` PyTorch's operators with the matrices that the factors multiply to, ``compiled``
these through ``torch.compile``. Times by CUDA graphs over rotating inputs larger than the L2 cache, all candidates of a case in one
shuffled run, after a check against float64; a launch is in them. ``bound_us`` is what a large copy and a large matrix product, measured
in the same run, allow for x, y and the candidate's weights.

Needs a CUDA device, and half a minute to four minutes a table.
Rows: recipes/results/kernels_h200.csv
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import recipe
from kernel_cases import TABLES, Comparison, compile_ahead
from kernel_operations import Place

from flysurgery.bench import Protocol, Record, rows_of_case
from flysurgery.errors import OptionError

TIMES = ("launch", "error", "median_us", "iqr_us")
JUDGED = ("bytes_moved", "flops", "bound_us", "share_of_bound", "noise", "status")
UNSEEN = ("config", "launches", "iqr_us", "bytes_moved", "flops")
"""Columns that are written, and not printed."""


def columns_of(comparison: Comparison) -> tuple[str, ...]:
    """The columns of a table's rows."""
    note = () if comparison.note is None else (comparison.note,)
    return (*comparison.columns, "candidate", *note, *TIMES, *comparison.ratios, *JUDGED)


def cases_of(comparison: Comparison, modes: Sequence[str], images: int, *, quick: bool = False, rows: int | None = None) -> list[Record]:
    """The columns that tell the cases apart, mode after mode, of the first cases with ``quick``."""
    given = {} if comparison.tokens is None else {"rows": rows or images * comparison.tokens}
    return [{"mode": mode, **case, **given} for mode in modes for case in comparison.cases[: comparison.quick if quick else None]]


def measure(comparison: Comparison, place: Place, protocol: Protocol, case: Mapping[str, Any]) -> list[Record]:
    """Check and time the candidates of one case, in microseconds, each over those that the table's ratios refer to."""
    rows = rows_of_case(case, lambda: replace(comparison.make(place, **case), worst=comparison.worst), case["mode"], protocol)
    by_name = {row["candidate"]: row for row in rows}
    for row in rows:
        for column, base in comparison.ratios.items():
            times = row["median_ms"], by_name[base]["median_ms"]
            row[column] = times[0] / times[1] if all(times) else None
        row |= {f"{name}_us": None if row[f"{name}_ms"] is None else 1e3 * row[f"{name}_ms"] for name in ("median", "iqr", "bound")}
    return rows


def main() -> None:
    parser = recipe.parser_of(__doc__)
    parser.add_argument("table", choices=TABLES, metavar="TABLE", help="one of the tables above")
    recipe.add_options(parser)
    parser.add_argument("--modes", help="out of fp32, tf32 (CUDA), fp16, bf16, or all; by default those of the table's rows")
    parser.add_argument("--seconds", type=recipe.duration, help="time for the samples of one candidate; 0.03 to 0.5 by default")
    parser.add_argument("--rows", type=recipe.count, help="rows of x where all cases have as many; those of 128 images by default")
    only_help = "the cases in whose columns, such as 'fp16, 384, gelu', it is found"
    parser.add_argument("--only", type=recipe.expression, default="", metavar="REGEX", help=only_help)
    options = parser.parse_args()
    comparison = TABLES[options.table]
    if options.rows is not None and comparison.tokens is None:
        raise OptionError(f"{options.table} has its own numbers of rows; leave --rows out")
    options.modes, options.seconds = options.modes or comparison.modes, options.seconds or comparison.seconds
    device, modes = recipe.device_and_modes(options, quick_on_cpu=True)
    place = Place(device, recipe.images(options, device))
    known = cases_of(comparison, modes, place.images, quick=options.quick, rows=options.rows)
    chosen = [head for head in known if options.only.search(_name(head))]
    if not chosen:
        raise OptionError(f"--only {options.only.pattern} matches none of the cases: {'; '.join(map(_name, known))}")

    def ready(jobs: list[recipe.Job]) -> list[recipe.Job]:
        if comparison.ahead and place.on_cuda and jobs:
            compile_ahead(options.table, place, [head for head, _ in jobs])
        return jobs

    jobs = [(head, partial(measure, comparison, place, recipe.protocol(options, 15), head)) for head in chosen]
    columns = columns_of(comparison)
    recipe.make(options, device, columns, jobs, shown=[name for name in columns if name not in UNSEEN], order=ready)


def _name(case: Mapping[str, Any]) -> str:
    return ", ".join(map(str, case.values()))


if __name__ == "__main__":
    recipe.main(main)
