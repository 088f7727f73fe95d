"""Wide layers factor by factor, beside a launch a layer and dense, for few rows and many: one table for one CUDA device.

``python recipes/wide_table.py --out recipes/results/wide_h200.csv``

A norm with q, k and v, and a whole feed-forward block with its norm and residual, in fp16, by the launches that the operators could choose
between; what decides stands in ``flysurgery/ops/wide.py``. Times by CUDA graphs over rotating inputs larger than the L2 cache, all
candidates of a size in one shuffled run, after a check against float64. ``bound_us`` is what a large copy and a large matrix product,
measured in the same run, allow for x, y and the candidate's weights. One image of a ViT has 197 rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import lru_cache, partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import recipe
import torch
from fused_ffn_table import ARCHITECTURES, DenseBlock, in_double, make_block, norm_in_double, truth_of
from torch import Tensor
from torch.nn import functional

from flysurgery.bench import MODES, Record, draw_lines
from flysurgery.factors import factors_to_dense
from flysurgery.ops import FusedFactors, Norm, composed
from flysurgery.ops.cuda.kernel import device_arch
from flysurgery.ops.epilogue import linear_epilogue
from flysurgery.ops.norm_linears import fused_norm_linear
from flysurgery.ops.wide import wide_ffn, wide_group

KINDS = (("monarch", 768), ("monarch", 512), ("monarch", 1024), ("gonon", 768))
PARTS = {"q, k and v": "qkv", "feed-forward": "ffn"}
"""The parts, and what stands in the names of their pictures."""

ROWS = (16, 197, 788, 1576, 3152, 6304, 12608, 25216)


@dataclass(frozen=True)
class Row:
    """One way to compute one part."""

    architecture: str
    width: int
    part: str
    rows: int
    candidate: str
    times: recipe.Times
    ratio_to_dense: float | None
    judged: recipe.Judged


def by_layers(x: Tensor, norm: Norm, up: FusedFactors, down: FusedFactors) -> Tensor:
    """A feed-forward block by a launch a layer."""
    return linear_epilogue(fused_norm_linear(x, norm, [up], "gelu"), down, residual=x)


def dense_group(x: Tensor, norm: Norm, weight: Tensor, bias: Tensor) -> Tensor:
    """A norm and the dense matrix of q, k and v."""
    return functional.linear(functional.layer_norm(x, x.shape[-1:], norm.weight, norm.bias, norm.eps), weight, bias)


@dataclass(frozen=True)
class Ways:
    """One part: the launches to choose between with the factors that they multiply by, dense with its matrices, the truth in float64."""

    runs: Mapping[str, recipe.Run]
    factors: Sequence[Tensor]
    dense: recipe.Run
    matrices: Sequence[Tensor]
    truth: recipe.Run


@lru_cache(maxsize=1)
def ways(part: str, name: str, width: int, dtype: torch.dtype, device: torch.device) -> Ways:
    """Random weights of the sizes of a trained block."""
    norm, up, down = make_block(name, width, dtype, device)
    if part == "feed-forward":
        runs: dict[str, recipe.Run] = {
            "factor by factor": partial(wide_ffn, norm=norm, up=up, down=down, activation="gelu", scale=None, residual=True),
            "a launch a layer": partial(by_layers, norm=norm, up=up, down=down),
        }
        block = DenseBlock(norm, up, down, "gelu", dtype)
        truth = partial(truth_of, norm=norm, up=up, down=down, activation="gelu")
        return Ways(runs, (*up.factors, *down.factors), block, (block.up.weight, block.down.weight), truth)
    patterns = ARCHITECTURES[name](width, width).patterns
    drawn = [[torch.randn(pattern.factor_shape) * pattern.c**-0.5 for pattern in patterns] for _ in range(3)]
    biases = torch.randn(3, width).to(device, dtype)
    group = [FusedFactors(tuple(f.to(device, dtype) for f in each), bias) for each, bias in zip(drawn, biases, strict=True)]
    runs = {
        "factor by factor": partial(wide_group, norm=norm, group=group),
        "one launch": partial(fused_norm_linear, norm=norm, group=group, activation="none"),
    }
    weight = torch.cat([factors_to_dense(in_double(each).factors) for each in group]).to(dtype)
    dense = partial(dense_group, norm=norm, weight=weight, bias=biases.flatten())
    truth = partial(composed.norm_linear, norm=norm_in_double(norm), group=[in_double(each) for each in group])
    return Ways(runs, [factor for each in group for factor in each.factors], dense, [weight], truth)


def prepare(case: tuple[str, str, int], all_rows: Sequence[int], nth: int) -> None:
    """Compile what one candidate launches into the cache, in a process of its own."""
    run = list(ways(*case, torch.float16, torch.device("cuda")).runs.values())[nth]
    with torch.inference_mode():
        for rows in all_rows:
            run(torch.randn(rows, case[2]).to("cuda", torch.float16))


def compile_ahead(cases: Sequence[Mapping[str, Any]]) -> None:
    """Compile the kernels of the cases side by side."""
    kinds = list(dict.fromkeys((case["part"], case["architecture"], case["width"]) for case in cases))
    rows = sorted({case["rows"] for case in cases})
    with ProcessPoolExecutor(2 * len(kinds), mp_context=get_context("spawn")) as pool:
        list(pool.map(prepare, kinds * 2, [rows] * 2 * len(kinds), [0] * len(kinds) + [1] * len(kinds)))


def measure(table: recipe.Table, part: str, architecture: str, width: int, rows: int) -> list[Row]:
    """Check and time the candidates for one number of rows."""
    (mode,) = table.modes
    given = ways(part, architecture, width, MODES[mode], table.device)
    x = torch.randn(rows, width).to(table.device, MODES[mode])
    runs = {name: table.kernel(run) for name, run in given.runs.items()} | {"dense": given.dense}
    truth = given.truth(x.double())
    moved = x.nbytes + truth.numel() * x.element_size()
    works = {key: recipe.work_of(moved, given.matrices if key == "dense" else given.factors, rows) for key in runs}
    found = table.measure(mode, runs, x, truth, works, base=x if part == "feed-forward" else None)
    return [Row(architecture, width, part, rows, name, *recipe.cells(each, found["dense"])) for name, each in found.items()]


def draw(records: Sequence[Record], plot: Path) -> None:
    """Lines over the number of rows, a picture for each part."""
    for part in PARTS:
        lines: dict[str, list[tuple[float, float]]] = {}
        for record in (each for each in records if each["part"] == part and each["ratio_to_dense"] and "dense" not in each["candidate"]):
            name = f"{record['architecture']} {record['width']}, {record['candidate']}"
            lines.setdefault(name, []).append((float(record["rows"]), float(record["ratio_to_dense"])))
        draw_lines(
            lines, recipe.of_mode(plot, PARTS[part]), across="rows", up="time / time of dense", title=f"{records[0]['device']}, {part}"
        )


def main() -> None:
    """Compile, measure, print and write."""
    parser = recipe.arguments(__doc__, seconds=0.03)
    parser.set_defaults(modes="fp16")
    table = recipe.table_of(parser)
    if table.on_cuda and device_arch(0) != "sm_90a":
        raise SystemExit("this table times a launch a factor by kernels of sm_90a, and there is no such device")
    cases = [
        {"part": part, "architecture": name, "width": width, "rows": rows}
        for part in PARTS
        for name, width in table.few(KINDS)
        for rows in table.few(ROWS)
    ]
    table.make(Row, cases, measure, draw, compile_ahead)


if __name__ == "__main__":
    recipe.main(main)
