"""Time the product with one factor beside bmm, einsum and dense on patterns of Gonon et al., and the factor gradient beside einsum.

    python recipes/time_single_factor.py products --count 120 --out recipes/results/single_factor_h200.csv
    python recipes/time_single_factor.py gradients --out recipes/results/factor_grad_h200.csv

25088 rows, batch-size-first, the median of captured calls with nothing of the inputs in the L2 cache. Products and gradients run in
their default configuration, by our kernels or, for large blocks, by PyTorch's batched product; ``--candidates`` also times
the next ones. The floor is the bytes of x and y at 4.24 TB/s.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from single_factor_cases import DTYPES, bmm, compile_all, grad_jobs, product_jobs
from torch import Tensor

from flysurgery.bench import take_stamp, write_csv
from flysurgery.bench.paper_patterns import ROWS, time_patterns
from flysurgery.errors import BackendError
from flysurgery.factors import factor_to_dense, ks_einsum, to_blocks
from flysurgery.ops.cuda.configured import factor_configs, factor_product
from flysurgery.ops.cuda.factor_grad import FactorGrad, grad_reason, gradient_configs
from flysurgery.ops.cuda.kernel import device_arch
from flysurgery.ops.cuda.obstacles import shared_limit_of
from flysurgery.ops.cuda.single import single_reason
from flysurgery.patterns import Pattern

BYTES_PER_US = 4.24e6
LARGEST_DENSE = 1 << 24
# The factors of ViT-S/16 in the patterns of Gonon et al., in Monarch ones with nblocks = 4, and two for comparison
GRADIENT_PATTERNS = [
    *((1, 192, 48, 2), (2, 48, 192, 1), (1, 768, 192, 2), (6, 64, 64, 1), (1, 128, 128, 3), (6, 64, 256, 1)),
    *((1, 96, 96, 4), (4, 96, 96, 1), (1, 384, 96, 4), (4, 96, 384, 1), (1, 384, 384, 1), (1, 64, 64, 16)),
]


@dataclass(frozen=True)
class Row:
    """Microseconds of one product or gradient; None where a rival was not run or did not fit into memory."""

    what: str
    a: int
    b: int
    c: int
    d: int
    mode: str
    cuda_us: float
    best_us: float
    bmm_us: float | None
    einsum_us: float | None
    dense_us: float | None
    floor_us: float

    @property
    def ratio(self) -> float:
        """Time of the default configuration over the faster of bmm and einsum."""
        return self.cuda_us / min(t for t in (self.bmm_us, self.einsum_us) if t is not None)


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


def median_or_none(call: Callable[[], object], flush: Tensor) -> float | None:
    """The same, or None where memory does not suffice."""
    try:
        return median_us(call, flush)
    except torch.OutOfMemoryError:
        return None
    finally:
        torch.cuda.empty_cache()


def time_product(pattern: Pattern, mode: str, count: int, flush: Tensor) -> Row:
    """One product in its first ``count`` configurations, and its rivals."""
    x = torch.randn((ROWS, pattern.in_features), device="cuda", dtype=DTYPES[mode])
    factor = torch.randn(pattern.factor_shape, device="cuda", dtype=DTYPES[mode])
    blocks = to_blocks(factor)
    dense = factor_to_dense(factor) if pattern.in_features * pattern.out_features <= LARGEST_DENSE else None
    ours, limit = [], shared_limit_of(0)
    for config in factor_configs(pattern, mode, ROWS, limit)[:count]:
        single = factor_product(pattern, mode, config, limit)
        image = single.pack(factor)
        ours.append(median_us(lambda single=single, image=image: single.run(x, image), flush))
    return Row(
        "product",
        *pattern.factor_shape,
        mode,
        ours[0],
        min(ours),
        median_or_none(lambda: bmm(x, blocks, pattern), flush),
        median_or_none(lambda: ks_einsum(x, factor), flush),
        None if dense is None else median_or_none(lambda: torch.nn.functional.linear(x, dense), flush),
        floor_us(pattern, x.element_size()),
    )


def time_gradient(pattern: Pattern, mode: str, count: int, flush: Tensor) -> Row:
    """One gradient in its first ``count`` configurations, and einsum."""
    x = torch.randn((ROWS, pattern.in_features), device="cuda").to(DTYPES[mode])
    dy = torch.randn((ROWS, pattern.out_features), device="cuda").to(DTYPES[mode])
    ours, limit = [], shared_limit_of(0)
    for config in gradient_configs(pattern, mode, limit, wgmma=device_arch(0) == "sm_90a")[:count]:
        product = FactorGrad(pattern, mode, config, shared_limit=limit)
        ours.append(median_us(lambda product=product: product.run(x, dy), flush))
    left, right = dy.unflatten(1, (pattern.a, pattern.b, pattern.d)), x.unflatten(1, (pattern.a, pattern.c, pattern.d))
    einsum = median_or_none(lambda: torch.einsum("nipj,niqj->ipqj", left, right), flush)
    return Row("gradient", *pattern.factor_shape, mode, ours[0], min(ours), None, einsum, None, floor_us(pattern, x.element_size()))


def floor_us(pattern: Pattern, element_bytes: int) -> float:
    """The time that the bytes of x and y take at the device's copy rate."""
    return element_bytes * ROWS * (pattern.in_features + pattern.out_features) / BYTES_PER_US


def summary(rows: list[Row], mode: str) -> str:
    """Share of wins over bmm and einsum, and by how much."""
    own = [row for row in rows if row.mode == mode]
    wins = sum(row.ratio < 1 for row in own)
    factor = statistics.median(1 / row.ratio for row in own)
    first = statistics.median(row.cuda_us / row.best_us for row in own)
    floor = statistics.median(row.cuda_us / row.floor_us for row in own)
    return (
        f"{own[0].what}s {mode}: faster than bmm and einsum on {wins} of {len(own)} ({100 * wins / len(own):.0f} %), median factor "
        f"{factor:.2f}, worst {min(1 / row.ratio for row in own):.2f}; over the floor of bytes {floor:.2f}; default over best {first:.2f}"
    )


def show(row: Row) -> str:
    """One row on one line."""
    times = " ".join(f"{name} {t:.0f}" for name, t in (("bmm", row.bmm_us), ("einsum", row.einsum_us), ("dense", row.dense_us)) if t)
    pattern = f"({row.a},{row.b},{row.c},{row.d})"
    return f"{row.mode} {pattern} {row.cuda_us:.0f} best {row.best_us:.0f} floor {row.floor_us:.0f} {times} ratio {row.ratio:.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("products", "gradients"))
    parser.add_argument("--count", type=int, default=120, help="how many of the patterns of the paper to draw")
    parser.add_argument("--candidates", type=int, default=1, help="configurations to time for each")
    parser.add_argument("--modes", help="comma-separated; fp16,fp32 for products and bf16,fp32 for gradients if not given")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="CSV file for the rows")
    options = parser.parse_args()
    arch, limit, count = device_arch(0), shared_limit_of(0), options.candidates
    products = options.what == "products"
    modes = (options.modes or ("fp16,fp32" if products else "bf16,fp32")).split(",")
    drawn = random.Random(options.seed).sample(time_patterns(), options.count) if products else [Pattern(*p) for p in GRADIENT_PATTERNS]
    reason = single_reason if products else grad_reason
    cases = [(p, mode) for p in drawn for mode in modes if reason(p, mode, limit) is None]
    if products:
        jobs = {
            job
            for p, m in cases
            for c in factor_configs(p, m, ROWS, limit)[:count]
            for job in product_jobs(factor_product(p, m, c, limit), arch)
        }
    else:
        jobs = {
            job
            for p, m in cases
            for c in gradient_configs(p, m, limit, wgmma=arch == "sm_90a")[:count]
            for job in grad_jobs(FactorGrad(p, m, c, shared_limit=limit), arch, False)
        }
    compile_all(jobs)
    flush = torch.zeros(1 << 26, dtype=torch.int32, device="cuda")
    rows: list[Row] = []
    for pattern, mode in cases:
        torch.backends.cuda.matmul.allow_tf32 = mode == "tf32"
        try:
            rows.append((time_product if products else time_gradient)(pattern, mode, count, flush))
            print(show(rows[-1]), flush=True)
        except BackendError as error:
            print(f"left out: {mode} {pattern}: {error}", flush=True)
        torch.cuda.empty_cache()
    for mode in modes:
        print(summary(rows, mode), flush=True)
    if options.out:
        write_csv(options.out, rows, take_stamp(torch.device("cuda")))


if __name__ == "__main__":
    main()
