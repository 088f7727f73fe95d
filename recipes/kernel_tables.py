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

import re
from collections.abc import Mapping, Sequence
from dataclasses import make_dataclass
from functools import partial
from typing import Any

import recipe
import tables
from kernel_cases import TABLES, Comparison, compile_ahead

from flysurgery.errors import OptionError

EVERY = re.compile("")


def row_of(comparison: Comparison) -> type[Any]:
    """The class of a table's rows, whose fields are the columns."""
    named = [*comparison.columns, comparison.series, *([comparison.note] if comparison.note else [])]
    fields: list[tuple[str, Any]] = [(name, object) for name in named]
    fields += [("times", tables.Times), *((name, float | None) for name in comparison.ratios), ("judged", tables.Judged)]
    return make_dataclass("Row", fields, frozen=True)


def cases_of(comparison: Comparison, table: tables.Table, only: re.Pattern[str] = EVERY) -> list[dict[str, Any]]:
    """The columns that tell the cases apart, mode after mode; of those in whose values the expression ``only`` is found.

    Raises:
        OptionError: it is found in none.
    """
    rows: dict[str, Any] = {} if comparison.tokens is None else {"rows": table.rows(comparison.tokens)}
    modes: list[dict[str, Any]] = [{} if comparison.mode is None else {comparison.mode: mode} for mode in table.modes]
    cases = [{**mode, **case, **rows} for mode in modes for case in table.few(comparison.cases, comparison.quick)]
    found = [case for case in cases if only.search(_name(case))]
    if not found:
        raise OptionError(f"--only {only.pattern} matches none of the cases: {'; '.join(map(_name, cases))}")
    return found


def _name(case: Mapping[str, Any]) -> str:
    return ", ".join(map(str, case.values()))


def measure(comparison: Comparison, table: tables.Table, **case: Any) -> list[Any]:
    """Check and time the candidates of one case."""
    mode, given = _apart(comparison, table, case)
    ready = comparison.make(table, mode, **given)
    how = {"baseline": ready.baseline, "worst": comparison.worst, "base": ready.base, "rows": range(len(ready.truth))}
    found = table.measure(mode, ready.runs, ready.x, ready.truth, ready.works, **how)
    if comparison.copy:
        found["copy"] = table.copy(mode, ready.moved)
    bases = [found[name] for name in comparison.ratios.values()]
    head = [str(value) for value in map((case | dict(ready.columns)).__getitem__, comparison.columns)]
    note = (lambda name: [ready.notes.get(name)]) if comparison.note else (lambda name: [])
    return [row_of(comparison)(*head, name, *note(name), *tables.cells(each, *bases)) for name, each in found.items()]


def _apart(comparison: Comparison, table: tables.Table, case: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """The mode of a case, and its other columns."""
    given = dict(case)
    return table.modes[0] if comparison.mode is None else given.pop(comparison.mode), given


def main() -> None:
    """Measure, print, write and draw."""
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
    table = tables.table_of(options)
    cases = cases_of(comparison, table, options.only)

    def prepare(todo: Sequence[Mapping[str, Any]]) -> None:
        compile_ahead(options.table, table, [_apart(comparison, table, case) for case in todo])

    records = table.make(row_of(comparison), cases, partial(measure, comparison, table), prepare if comparison.ahead else None)
    (ratio, *_) = comparison.ratios
    tables.draw(options.plot, records, group=comparison.group, ratio=ratio, series=comparison.series, by=comparison.by)


if __name__ == "__main__":
    recipe.main(main)
