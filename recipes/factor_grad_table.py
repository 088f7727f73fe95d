"""Time the gradient of one factor, the factors of a ViT-S/16 among them, beside einsum.

    python recipes/factor_grad_table.py --out recipes/results/factor_grad_h200.csv

25088 rows, batch-size-first, the median of captured calls with nothing of the inputs in the L2 cache. Gradients run in their
default configuration; ``--candidates`` also times the next ones. ``bound_us`` is what a large copy and a large matrix product, measured in
the same run, allow for x, dy and the gradient.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

import recipe
import torch
from single_factor_cases import compile_all, grad_jobs
from torch import Tensor

from flysurgery.bench import in_mode
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
    """Microseconds of one gradient."""

    a: int
    b: int
    c: int
    d: int
    mode: str
    cuda_us: float
    best_us: float
    einsum_us: float
    bound_us: float
    share_of_bound: float

    @property
    def ratio(self) -> float:
        """Time of the default configuration over that of einsum."""
        return self.cuda_us / self.einsum_us


def median_us(call: Callable[[], object], flush: Tensor) -> float:
    """Median time of a captured call, seven repeats of short ones and three of those above 1 ms."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    times: list[float] = []
    while len(times) < (3 if times and times[0] > 1000 else 7):
        flush.sum()  # reading leaves no lines in the cache that would have to be written back
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000)
    return statistics.median(times)


def time_gradient(pattern: Pattern, mode: str, count: int, flush: Tensor) -> Row:
    """One gradient in its first ``count`` configurations, and einsum."""
    ours, limit = [], shared_limit_of(0)
    with in_mode(mode) as dtype:
        x = torch.randn((ROWS, pattern.in_features), device="cuda").to(dtype)
        dy = torch.randn((ROWS, pattern.out_features), device="cuda").to(dtype)
        for config in gradient_configs(pattern, mode, limit, wgmma=device_arch(0) == "sm_90a")[:count]:
            product = FactorGrad(pattern, mode, config, shared_limit=limit)
            ours.append(median_us(lambda product=product: product.run(x, dy), flush))
        bound = recipe.bound_us(mode, x.nbytes + dy.nbytes, [torch.empty(pattern.factor_shape, dtype=dtype)], ROWS)
        left, right = dy.unflatten(1, (pattern.a, pattern.b, pattern.d)), x.unflatten(1, (pattern.a, pattern.c, pattern.d))
        einsum = median_us(lambda: torch.einsum("nipj,niqj->ipqj", left, right), flush)
    return Row(*pattern.factor_shape, mode, ours[0], min(ours), einsum, bound, bound / ours[0])


def summary(rows: list[Row], mode: str) -> str:
    """Share of wins over einsum, and by how much."""
    own = [row for row in rows if row.mode == mode]
    wins = sum(row.ratio < 1 for row in own)
    factor = statistics.median(1 / row.ratio for row in own)
    first = statistics.median(row.cuda_us / row.best_us for row in own)
    bound = statistics.median(row.share_of_bound for row in own)
    return (
        f"{mode}: faster than einsum on {wins} of {len(own)}, median factor {factor:.2f}, worst {min(1 / row.ratio for row in own):.2f}; "
        f"of the bound {bound:.0%}; default over best {first:.2f}"
    )


def main() -> None:
    """Measure, print and write."""
    parser = recipe.table_arguments(__doc__, modes=("bf16", "fp32"))
    parser.add_argument("--candidates", type=int, default=1, help="configurations to time for each")
    options = recipe.on_cuda(parser)
    arch, limit, modes = device_arch(0), shared_limit_of(0), options.modes.split(",")
    cases = [(Pattern(*shape), mode) for shape in PATTERNS for mode in modes if grad_reason(Pattern(*shape), mode, limit) is None]
    compile_all(
        {
            job
            for pattern, mode in cases
            for config in gradient_configs(pattern, mode, limit, wgmma=arch == "sm_90a")[: options.candidates]
            for job in grad_jobs(FactorGrad(pattern, mode, config, shared_limit=limit), arch, False)
        }
    )
    flush = torch.zeros(1 << 26, dtype=torch.int32, device="cuda")
    rows: list[Row] = []
    for pattern, mode in cases:
        try:
            row = time_gradient(pattern, mode, options.candidates, flush)
        except BackendError as error:
            print(f"left out: {mode} {pattern}: {error}", flush=True)
            continue
        rows.append(row)
        times = f"{row.cuda_us:.0f} best {row.best_us:.0f} bound {row.bound_us:.0f} einsum {row.einsum_us:.0f} ratio {row.ratio:.3f}"
        print(f"{mode} {pattern} {times}", flush=True)
        torch.cuda.empty_cache()
    for mode in modes:
        print(summary(rows, mode), flush=True)
    recipe.keep(options, rows)


if __name__ == "__main__":
    main()
