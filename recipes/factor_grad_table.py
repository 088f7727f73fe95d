"""The gradient of one factor, the factors of a ViT-S/16 among them, beside einsum.

    python recipes/factor_grad_table.py --out recipes/results/factor_grad_h200.csv

25088 rows, batch-size-first. Times by CUDA graphs over rotating inputs larger than the L2 cache, all candidates of a factor in one shuffled
run, after a check against float64. Gradients run in their default configuration; ``--candidates`` also times the next ones. ``bound_us`` is
what a large copy and a large matrix product, measured in the same run, allow for x, dy and the gradient.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import recipe
import torch
from single_factor_cases import compile_all, grad_jobs
from torch import Tensor

from flysurgery.bench import Record, in_mode, time_interleaved
from flysurgery.bench.paper_patterns import ROWS
from flysurgery.errors import BackendError
from flysurgery.ops.cuda.factor_grad import FactorGrad, grad_reason, gradient_configs
from flysurgery.ops.cuda.kernel import device_arch
from flysurgery.ops.cuda.obstacles import shared_limit_of
from flysurgery.patterns import Pattern

# The factors of ViT-S/16 in the patterns of Gonon et al., in Monarch ones with nblocks = 4, and two for comparison
PATTERNS = [
    *((1, 192, 48, 2), (2, 48, 192, 1), (1, 768, 192, 2), (6, 64, 64, 1), (1, 128, 128, 3), (6, 64, 256, 1)),
    *((1, 96, 96, 4), (4, 96, 96, 1), (1, 384, 96, 4), (4, 96, 384, 1), (1, 384, 384, 1), (1, 64, 64, 16)),
]


@dataclass(frozen=True)
class Row:
    """One candidate of one gradient. ``error`` is relative to float64, in the Frobenius norm."""

    a: int
    b: int
    c: int
    d: int
    mode: str
    candidate: str
    error: float
    median_us: float
    iqr_us: float
    ratio_to_einsum: float
    judged: recipe.Judged


def measure(pattern: Pattern, mode: str, count: int) -> list[Row]:
    """Check and time one gradient in its first ``count`` configurations, and einsum."""

    def parts(both: Tensor) -> tuple[Tensor, Tensor]:  # shapes: (rows, a*c*d), (rows, a*b*d)
        x, dy = both.split((ROWS * pattern.in_features, ROWS * pattern.out_features))
        return x.view(ROWS, -1), dy.view(ROWS, -1)

    def einsum(both: Tensor) -> Tensor:
        x, dy = parts(both)
        left, right = dy.unflatten(1, (pattern.a, pattern.b, pattern.d)), x.unflatten(1, (pattern.a, pattern.c, pattern.d))
        return torch.einsum("nipj,niqj->ipqj", left, right)

    torch.manual_seed(0)
    limit = shared_limit_of(0)
    with in_mode(mode) as dtype:
        both = torch.randn(ROWS * (pattern.in_features + pattern.out_features), device="cuda").to(dtype)
        runs: dict[str, Callable[[Tensor], Tensor]] = {}
        for nth, config in enumerate(gradient_configs(pattern, mode, limit, wgmma=device_arch(0) == "sm_90a")[:count]):
            product = FactorGrad(pattern, mode, config, shared_limit=limit)
            runs[f"configuration {nth + 1}" if nth else "cuda"] = lambda both, product=product: product.run(*parts(both))
        runs |= {"einsum": einsum, "einsum again": einsum}
        truth = einsum(both.double())
        errors = {name: float((run(both) - truth).norm() / truth.norm()) for name, run in runs.items()}
        wrong = [name for name, error in errors.items() if not error < 16 * errors["einsum"]]
        if wrong:
            raise SystemExit(f"{pattern} {mode}: {wrong[0]} is wrong, relative error {errors[wrong[0]]:.2g}")
        timings = time_interleaved(runs, both, rounds=15, seconds=0.1)
        work = recipe.work_of(both.nbytes, [truth.to(dtype)], ROWS)
        judged = recipe.judge(mode, timings, dict.fromkeys(runs, work), "einsum")
    base, found = timings["einsum"].median_ms, list[Row]()
    for name, each in timings.items():
        times = 1e3 * each.median_ms, 1e3 * each.iqr_ms, each.median_ms / base
        found.append(Row(*pattern.factor_shape, mode, name, errors[name], *times, judged[name]))
    return found


def summary(rows: list[Row], mode: str) -> str:
    """Share of wins over einsum, and by how much."""
    own = [row for row in rows if row.mode == mode and row.candidate == "cuda"]
    factors, shares = [1 / row.ratio_to_einsum for row in own], [row.judged.share_of_bound for row in own]
    wins, factor, share = sum(each > 1 for each in factors), statistics.median(factors), statistics.median(shares)
    sizes = f"median factor {factor:.2f}, worst {min(factors):.2f}; of the bound {share:.0%}"
    return f"{mode}: faster than einsum on {wins} of {len(own)}, {sizes}"


def draw(records: Sequence[Record], plot: Path) -> None:
    """Bars for each factor, a picture for each mode."""
    recipe.draw(plot, records, group=("a", "b", "c", "d"), ratio="ratio_to_einsum")


def main() -> None:
    """Measure, print and write."""
    parser = recipe.table_arguments(__doc__, modes=("bf16", "fp32"))
    parser.add_argument("--candidates", type=recipe.count, default=1, help="configurations to time for each")
    options = recipe.on_cuda(parser)
    arch, limit, modes = device_arch(0), shared_limit_of(0), options.modes
    cases = [(Pattern(*shape), mode) for shape in PATTERNS for mode in modes if grad_reason(Pattern(*shape), mode, limit) is None]
    compile_all(
        {
            job
            for pattern, mode in cases
            for config in gradient_configs(pattern, mode, limit, wgmma=arch == "sm_90a")[: options.candidates]
            for job in grad_jobs(FactorGrad(pattern, mode, config, shared_limit=limit), arch, False)
        }
    )
    found: list[Row] = []
    for pattern, mode in cases:
        try:
            rows = measure(pattern, mode, options.candidates)
        except BackendError as error:
            print(f"left out: {mode} {pattern}: {error}", flush=True)
            continue
        found += rows
        times = ", ".join(f"{row.candidate} {row.median_us:.1f}" for row in rows)
        print(f"{mode} {pattern}: {times} us, bound {rows[0].judged.bound_us:.1f}; cuda / einsum {rows[0].ratio_to_einsum:.3f}", flush=True)
        recipe.keep(options, found)
        torch.cuda.empty_cache()
    for mode in modes:
        print(summary(found, mode), flush=True)
    if options.plot is not None:
        draw(recipe.records_of(found), options.plot)


if __name__ == "__main__":
    recipe.main(main)
