"""Wide layers factor by factor, beside a launch a layer and dense, for few rows and many: one table for one CUDA device.

``python recipes/wide_table.py --out recipes/results/wide_h200.csv``

A norm with q, k and v, and a whole feed-forward block with its norm and residual, in fp16, by the launches that the operators could choose
between; what decides stands in ``flysurgery/ops/wide.py``. Times by CUDA graphs over rotating inputs larger than the L2 cache, all
candidates of a size in one shuffled run, after a check against float64. ``bound_us`` is what a large copy and a large matrix product,
measured in the same run, allow for x, y and the candidate's weights. One image of a ViT has 197 rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import recipe
import torch
from fused_ffn_table import ARCHITECTURES, DenseBlock, make_block
from torch import Tensor
from torch.nn import functional

from flysurgery.bench import Record, draw_lines, time_interleaved
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
Run = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Row:
    """One way to compute one part. ``error`` is relative to float64, in the Frobenius norm, of a block's change of x."""

    architecture: str
    width: int
    part: str
    rows: int
    candidate: str
    error: float
    median_us: float
    iqr_us: float
    ratio_to_dense: float
    judged: recipe.Judged


def by_layers(x: Tensor, norm: Norm, up: FusedFactors, down: FusedFactors) -> Tensor:
    """A feed-forward block by a launch a layer."""
    return linear_epilogue(fused_norm_linear(x, norm, [up], "gelu"), down, residual=x)


def dense_group(x: Tensor, norm: Norm, weight: Tensor, bias: Tensor) -> Tensor:
    """A norm and the dense matrix of q, k and v."""
    return functional.linear(functional.layer_norm(x, x.shape[-1:], norm.weight, norm.bias, norm.eps), weight, bias)


def wide(layer: FusedFactors) -> FusedFactors:
    """In float64."""
    return FusedFactors(tuple(f.double() for f in layer.factors), None if layer.bias is None else layer.bias.double())


@dataclass(frozen=True)
class Ways:
    """One part: the launches to choose between with the factors that they multiply by, dense with its matrices, the truth in float64."""

    runs: Mapping[str, Run]
    factors: Sequence[Tensor]
    dense: Run
    matrices: Sequence[Tensor]
    truth: Run


def ways(part: str, name: str, width: int) -> Ways:
    """Random weights of the sizes of a trained block."""
    torch.manual_seed(0)
    norm, up, down = make_block(name, width, torch.float16)
    assert norm.weight is not None and norm.bias is not None
    exact = Norm(norm.weight.double(), norm.bias.double(), norm.eps)
    if part == "feed-forward":
        runs: dict[str, Run] = {
            "factor by factor": partial(wide_ffn, norm=norm, up=up, down=down, activation="gelu", scale=None, residual=True),
            "a launch a layer": partial(by_layers, norm=norm, up=up, down=down),
        }
        block = DenseBlock(norm, up, down, "gelu", torch.float16)
        truth = partial(composed.ffn, norm=exact, up=wide(up), down=wide(down))
        return Ways(runs, (*up.factors, *down.factors), block, (block.up.weight, block.down.weight), truth)
    patterns = ARCHITECTURES[name](width, width).patterns
    drawn = [[torch.randn(pattern.factor_shape) * pattern.c**-0.5 for pattern in patterns] for _ in range(3)]
    biases = torch.randn(3, width).to("cuda", torch.float16)
    group = [FusedFactors(tuple(f.to("cuda", torch.float16) for f in each), bias) for each, bias in zip(drawn, biases, strict=True)]
    runs = {
        "factor by factor": partial(wide_group, norm=norm, group=group),
        "one launch": partial(fused_norm_linear, norm=norm, group=group, activation="none"),
    }
    weight = torch.cat([factors_to_dense(wide(each).factors) for each in group]).half()
    dense = partial(dense_group, norm=norm, weight=weight, bias=biases.flatten())
    truth = partial(composed.norm_linear, norm=exact, group=[wide(each) for each in group])
    return Ways(runs, [factor for each in group for factor in each.factors], dense, [weight], truth)


def prepare(case: tuple[str, str, int], nth: int) -> None:
    """Compile what one candidate launches into the cache, in a process of its own."""
    run = list(ways(*case).runs.values())[nth]
    with torch.no_grad():
        for rows in ROWS:
            run(torch.randn(rows, case[2]).to("cuda", torch.float16))


def measure(part: str, name: str, width: int) -> Iterator[Row]:
    """Check and time the candidates for each number of rows."""
    given = ways(part, name, width)
    runs = {**given.runs, "dense": given.dense, "dense again": given.dense}
    for rows in ROWS:
        x = torch.randn(rows, width).to("cuda", torch.float16)
        exact, base = given.truth(x.double()), x.double() if part == "feed-forward" else 0
        errors = {key: float((run(x) - exact).norm() / (exact - base).norm()) for key, run in runs.items()}
        wrong = next((key for key, error in errors.items() if not error < 2 * errors["dense"]), None)
        if wrong is not None:
            raise SystemExit(f"{name} {width} {part} of {rows} rows: {wrong} is wrong, relative error {errors[wrong]:.2g}")
        timings = time_interleaved(runs, x, rounds=15, seconds=0.03)
        moved = x.nbytes + exact.numel() * x.element_size()
        works = {key: recipe.work_of(moved, given.matrices if "dense" in key else given.factors, rows) for key in runs}
        judged = recipe.judge("fp16", timings, works)
        for key, t in timings.items():
            ratio = t.median_ms / timings["dense"].median_ms
            yield Row(name, width, part, rows, key, errors[key], 1e3 * t.median_ms, 1e3 * t.iqr_ms, ratio, judged[key])


def draw(records: Sequence[Record], plot: Path) -> None:
    """Lines over the number of rows, a picture for each part."""
    for part in PARTS:
        lines: dict[str, list[tuple[float, float]]] = {}
        for record in (each for each in records if each["part"] == part and "dense" not in each["candidate"]):
            name = f"{record['architecture']} {record['width']}, {record['candidate']}"
            lines.setdefault(name, []).append((float(record["rows"]), float(record["ratio_to_dense"])))
        draw_lines(
            lines, recipe.of_mode(plot, PARTS[part]), across="rows", up="time / time of dense", title=f"{records[0]['device']}, {part}"
        )


def main() -> None:
    """Compile, measure, print and write."""
    options = recipe.on_cuda(recipe.table_arguments(__doc__))
    if device_arch(0) != "sm_90a":
        raise SystemExit("this table times a launch a factor by kernels of sm_90a, and there is no such device")
    cases = [(part, *kind) for part in PARTS for kind in KINDS]
    with ProcessPoolExecutor(2 * len(cases), mp_context=get_context("spawn")) as pool:
        list(pool.map(prepare, cases * 2, [0] * len(cases) + [1] * len(cases)))
    found: list[Row] = []
    with torch.no_grad():
        for case in cases:
            for row in measure(*case):
                found.append(row)
                print(f"{row.architecture} {row.width} {row.part} {row.rows} rows: {row.candidate} {row.median_us:.1f} us", flush=True)
            recipe.keep(options, found)
    if options.plot is not None:
        draw(recipe.records_of(found), options.plot)


if __name__ == "__main__":
    recipe.main(main)
