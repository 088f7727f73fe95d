"""Launch the kernels on small shapes, for NVIDIA's compute-sanitizer to watch.

    compute-sanitizer --tool memcheck --error-exitcode 1 python recipes/sanitize_kernels.py
    compute-sanitizer --tool racecheck --error-exitcode 1 python recipes/sanitize_kernels.py --cases 0::4

The cases are those of the tables of kernels and of factors, on numbers of rows that are no multiples of anything. Kernels whose blocks
stay for more rows run on enough of them for a second round too. Each candidate that launches kernels of this project is called twice, as
some second launches begin before the first ends. Prints what was launched. The tools are slow: ``--cases 0::4`` takes every fourth case, so
that four processes share the work, and --quick every sixteenth.

What the tools said: recipes/results/sanitizer_h200.txt, of an earlier version, which called the launches themselves.

Needs a CUDA device and NVIDIA's compute-sanitizer.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import factors
import kernel_tables
import recipe
import torch
import vits
from recipe import Place, Table, name_of

from flysurgery.bench import in_mode

ROWS = (1, 75)
ALL, HALVES_AND_FLOAT = ("fp16", "bf16", "tf32", "fp32"), ("fp16", "fp32")
OWN = ("fused", "dense fused", "layer", "flysurgery", "cuda", "two launches", "factor by factor", "one launch", "a launch a layer")
OWN += ("optimized", "dense optimized")
"""The candidates that launch kernels of this project."""

PATTERNS = ((2, 19, 37, 3), (1, 48, 64, 1), (2, 136, 72, 8))
SIZES = ((2, 1, 2), (2, 75, 2), (2, 300, 68), (2, 197, 68))
"""Images, tokens and heads."""


def rows_of_two_rounds() -> int:
    """More than three warpgroups a block take in their first round."""
    return 192 * torch.cuda.get_device_properties(0).multi_processor_count + 75


def cases(place: Place) -> Iterator[tuple[Table, recipe.Record]]:
    """Tables, and what tells their cases apart."""
    kernels, many = kernel_tables.TABLES, (rows_of_two_rounds(),)

    def of(table: Table, **axes: tuple[Any, ...]) -> Iterator[tuple[Table, recipe.Record]]:
        return ((table, head) for head in table.heads(place, **axes))

    yield from of(kernels["fused_linear"], layer=("square", "qkv", "up", "monarch down"), mode=ALL, rows=ROWS)
    yield from of(kernels["fused_linear"], layer=("square",), mode=HALVES_AND_FLOAT, rows=many)
    yield from of(kernels["norm_linear"], mode=ALL, rows=ROWS)
    yield from of(kernels["fused_ffn"], width=(192,), activation=("gelu",), mode=ALL, rows=ROWS)
    yield from of(kernels["fused_ffn"], width=(192,), architecture=("gonon",), activation=("gelu_tanh",), mode=ALL, rows=many)
    yield from of(kernels["gated_ffn"], model=("eva02_tiny", "eva02_base"), mode=HALVES_AND_FLOAT, rows=ROWS)
    yield from of(kernels["few_rows"], mode=("fp16", "bf16", "fp32"), rows=(197,))
    yield from of(kernels["wide"], mode=("fp16", "bf16"), rows=(75, *many))
    yield from of(kernels["factor_gradients"], layer=("square", "qkv"), mode=("bf16", "fp32"), rows=(75,))
    for mode in ALL[:2] + ALL[3:]:
        yield from ((kernels["attention"], {"images": n, "tokens": tokens, "heads": heads, "mode": mode}) for n, tokens, heads in SIZES)
    for mode in ALL:
        for pattern in PATTERNS:
            for rows in ROWS:
                head = dict(zip("abcd", pattern, strict=True))
                yield factors.TABLES["patterns"], {**head, "rows": rows, "mode": mode, "layout": "first"}
        yield from of(vits.TABLES["optimized"], model=("test_vit",), batch=(3,), mode=(mode,), arch=("monarch",))


def launch(place: Place, table: Table, head: recipe.Record) -> None:
    candidates = {"candidates": tuple(name for name in table.candidates if name in OWN)} if table.candidates else {}
    assert table.make is not None
    with in_mode(head["mode"]), torch.no_grad():
        case = table.make(place, **head, **candidates)
        for name, run in case.runs.items():
            if name in OWN and not isinstance(run, str):
                for _ in range(2):
                    run(case.input(name))


def main() -> None:
    parser = recipe.parser_of(__doc__)
    parser.add_argument("--cases", type=recipe.stretch, default=slice(None), metavar="FROM:TO:STEP", help="these alone, by their order")
    parser.add_argument("--quick", dest="cases", action="store_const", const=slice(0, None, 16), help="the same as --cases 0::16")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this needs a CUDA device, and PyTorch finds none")
    torch.manual_seed(0)
    place = Place(torch.device("cuda"))
    for table, head in [*cases(place)][options.cases]:
        launch(place, table, head)
        print(name_of(head), flush=True)
    torch.cuda.synchronize()


if __name__ == "__main__":
    recipe.main(main)
