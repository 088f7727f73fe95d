"""The gradient of one factor, the factors of a ViT-S/16 among them, beside einsum.

    python recipes/factor_grad_table.py --out recipes/results/factor_grad_h200.csv

25088 rows, batch-size-first. Times by CUDA graphs over rotating inputs larger than the L2 cache, all candidates of a factor in one shuffled
run, after a check against float64. Gradients run in their default configuration; ``--candidates`` also times the next ones. ``bound_us`` is
what a large copy and a large matrix product, measured in the same run, allow for x, dy and the gradient.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import recipe
import torch
from single_factor_cases import compile_all, grad_jobs
from torch import Tensor

from flysurgery.bench import MODES, Record
from flysurgery.ops.cuda.factor_grad import FactorGrad, grad_reason, gradient_configs
from flysurgery.ops.cuda.kernel import device_arch
from flysurgery.ops.cuda.obstacles import shared_limit_of
from flysurgery.patterns import Pattern

TOKENS = 196
PATTERNS = (
    *((1, 192, 48, 2), (2, 48, 192, 1), (1, 768, 192, 2), (6, 64, 64, 1), (1, 128, 128, 3), (6, 64, 256, 1)),
    *((1, 96, 96, 4), (4, 96, 96, 1), (1, 384, 96, 4), (4, 96, 384, 1), (1, 384, 384, 1), (1, 64, 64, 16)),
)
"""The factors of ViT-S/16 in the patterns of Gonon et al., in Monarch ones with nblocks = 4, and two for comparison."""


@dataclass(frozen=True)
class Row:
    """One candidate of one gradient."""

    a: int
    b: int
    c: int
    d: int
    mode: str
    candidate: str
    times: recipe.Times
    ratio_to_einsum: float | None
    judged: recipe.Judged


def kernels(pattern: Pattern, mode: str, count: int) -> list[FactorGrad]:
    """The kernel in its first ``count`` configurations, none where it cannot run."""
    limit = shared_limit_of(0)
    if grad_reason(pattern, mode, limit) is not None:
        return []
    configs = gradient_configs(pattern, mode, limit, wgmma=device_arch(0) == "sm_90a")[:count]
    return [FactorGrad(pattern, mode, config, shared_limit=limit) for config in configs]


def measure(table: recipe.Table, a: int, b: int, c: int, d: int, mode: str) -> list[Row]:
    """Check and time one gradient in its first configurations, and einsum."""
    pattern, rows = Pattern(a, b, c, d), table.rows(TOKENS)

    def parts(both: Tensor) -> tuple[Tensor, Tensor]:  # shapes: (rows, a*c*d), (rows, a*b*d)
        x, dy = both.split((rows * pattern.in_features, rows * pattern.out_features))
        return x.view(rows, -1), dy.view(rows, -1)

    def einsum(both: Tensor) -> Tensor:
        x, dy = parts(both)
        return torch.einsum("nipj,niqj->ipqj", dy.unflatten(1, (a, b, d)), x.unflatten(1, (a, c, d)))

    both = torch.randn(rows * (pattern.in_features + pattern.out_features), device=table.device).to(MODES[mode])
    runs: dict[str, recipe.Run | str] = {"cuda": recipe.NEEDS_CUDA, "einsum": einsum}
    if table.on_cuda:
        runs["cuda"] = f"no: {grad_reason(pattern, mode, shared_limit_of(0))}"
        for nth, kernel in enumerate(kernels(pattern, mode, table.options.candidates)):
            runs[f"configuration {nth + 1}" if nth else "cuda"] = lambda both, kernel=kernel: kernel.run(*parts(both))
    truth = einsum(both.double())
    work = recipe.work_of(both.nbytes, [truth.to(both.dtype)], rows)
    found = table.measure(mode, runs, both, truth, work, baseline="einsum", worst=16)
    return [Row(a, b, c, d, mode, name, *recipe.cells(each, found["einsum"])) for name, each in found.items()]


def compile_ahead(candidates: int, cases: Sequence[Mapping[str, Any]]) -> None:
    """Compile the kernels of the cases side by side."""
    arch = device_arch(0)
    compile_all(
        {
            job
            for case in cases
            for kernel in kernels(Pattern(*(case[name] for name in "abcd")), case["mode"], candidates)
            for job in grad_jobs(kernel, arch, False)
        }
    )


def summary(records: Sequence[Record], mode: str) -> str:
    """Share of wins over einsum, and by how much."""
    own = [record for record in records if record["mode"] == mode and record["candidate"] == "cuda" and record["median_us"]]
    if not own:
        return f"{mode}: no gradient was timed"
    factors, shares = [1 / float(record["ratio_to_einsum"]) for record in own], [float(record["share_of_bound"]) for record in own]
    wins, factor, share = sum(each > 1 for each in factors), statistics.median(factors), statistics.median(shares)
    sizes = f"median factor {factor:.2f}, worst {min(factors):.2f}; of the bound {share:.0%}"
    return f"{mode}: faster than einsum on {wins} of {len(own)}, {sizes}"


def draw(records: Sequence[Record], plot: Path) -> None:
    """Bars for each factor, a picture for each mode."""
    recipe.draw(plot, records, group=("a", "b", "c", "d"), ratio="ratio_to_einsum")


def main() -> None:
    """Measure, print and write."""
    parser = recipe.arguments(__doc__, modes="bf16,fp32", seconds=0.1)
    parser.add_argument("--candidates", type=recipe.count, default=1, help="configurations to time for each")
    table = recipe.table_of(parser)
    patterns = [dict(zip("abcd", shape, strict=True)) for shape in table.few(PATTERNS)]
    cases = [pattern | {"mode": mode} for pattern in patterns for mode in table.modes]
    records = table.make(Row, cases, measure, draw, partial(compile_ahead, table.options.candidates))
    for mode in table.modes:
        print(summary(records, mode))


if __name__ == "__main__":
    recipe.main(main)
