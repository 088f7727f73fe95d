"""Check and time the single-factor kernel and the factor gradient on a CUDA device.

    python recipes/check_single_factor.py check            # every mode against float64, element by element
    python recipes/check_single_factor.py time --count 40  # beside bmm, einsum and dense, on patterns of Gonon et al.
    python recipes/check_single_factor.py grad             # gradients: correctness and time

Failing cases are printed with the first wrong index; the exit status is 1 if there are any.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import torch
from torch import Tensor

from flysurgery.factors import factor_to_dense, ks_einsum, to_blocks
from flysurgery.ops.cuda.cubins import find_cubin
from flysurgery.ops.cuda.factor_grad import FactorGrad, GradTiling, grad_configs, grad_reason
from flysurgery.ops.cuda.kernel import device_arch
from flysurgery.ops.cuda.single import SingleFactor, candidates, single_reason
from flysurgery.ops.cuda.single_tiling import config_to_json
from flysurgery.patterns import Pattern

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "tf32": torch.float32, "fp32": torch.float32, "exact": torch.float32}
INPUT_ERROR = {"fp16": 0.0, "bf16": 0.0, "tf32": 2.0**-10 + 2.0**-22, "fp32": 3 * 2.0**-22, "exact": 0.0}
OUTPUT_ERROR = {"fp16": 2.0**-11, "bf16": 2.0**-8, "tf32": 0.0, "fp32": 0.0, "exact": 0.0}
SUM_ERROR = {"fp16": 2.0**-23, "bf16": 2.0**-23, "tf32": 2.0**-23, "fp32": 2.0**-23, "exact": 2.0**-24}
ROWS = 25088
Job = tuple[str, tuple[tuple[str, int], ...], str, str]


def paper_patterns() -> list[Pattern]:
    """The patterns that Gonon et al. 2024 time (arXiv:2405.15013, Appendix B.1): sides of at most 2^31 entries at 25088 rows."""
    repeats = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
    sizes = (48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
    skipped = {(1024, 256), (512, 128), (256, 64)}
    blocks = [(b, c) for b, c in itertools.product(sizes, sizes) if b == c or b == 4 * c or c == 4 * b]
    found = [(1, b, c, d) for (b, c), d in itertools.product(blocks, repeats)]
    found += [(a, b, c, d) for a, (b, c), d in itertools.product(repeats[1:], blocks, (4, 16, 64)) if (max(b, c), min(b, c)) not in skipped]
    limit = 2**31 - 1
    return [Pattern(*p) for p in found if ROWS * p[0] * max(p[1], p[2]) * p[3] <= limit and p[0] * p[1] * p[2] * p[3] <= limit]


def grid_patterns() -> Iterator[Pattern]:
    """Small, odd and large patterns."""
    for a, d, (b, c) in itertools.product((1, 2, 6), (1, 2, 3, 5), ((3, 5), (16, 16), (48, 192), (64, 64), (192, 48))):
        yield Pattern(a, b, c, d)
    yield from (Pattern(*p) for p in ((1, 64, 64, 4), (2, 48, 96, 6), (1, 33, 20, 7), (1, 64, 48, 8), (1, 40, 24, 12), (1, 64, 64, 16)))
    yield from (
        Pattern(*p) for p in ((1, 17, 19, 17), (1, 48, 48, 24), (2, 64, 64, 32), (1, 48, 64, 64), (1, 16, 32, 128), (1, 1024, 256, 2))
    )
    yield from (
        Pattern(*p) for p in ((1, 256, 1024, 4), (1, 384, 384, 1), (1, 1024, 1024, 3), (2, 256, 256, 16), (1, 20, 20, 20), (1, 9, 40, 11))
    )


def compile_job(job: Job) -> None:
    """Put one kernel into the cache folder."""
    source, defines, arch, name = job
    find_cubin(source, dict(defines), arch=arch, name=name)


def compile_all(jobs: set[Job]) -> None:
    """Compile in parallel what is not cached yet."""
    start = time.time()
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        list(pool.map(compile_job, sorted(jobs), chunksize=4))
    print(f"compiled {len(jobs)} kernels in {time.time() - start:.0f} s", flush=True)


def single_jobs(single: SingleFactor, arch: str, misaligned: bool) -> set[Job]:
    """The kernels that one product needs."""
    vectors = {single.tile.x_vector} | ({single.tile.element_bytes} if misaligned else set())
    return {("single_factor.cu", tuple(single.tile.defines(v).items()), arch, "single_factor") for v in vectors}


def first_wrong(out: Tensor, reference: Tensor, bound: Tensor) -> str | None:
    """Count and first index of elements that are out of bounds, or not finite where the reference is."""
    wrong = ~((out.double() - reference).abs() <= bound)
    if not wrong.any():
        return None
    index = tuple(int(n) for n in wrong.nonzero()[0])
    return (
        f"{int(wrong.sum())} of {wrong.numel()} wrong, first {index}: got {out[index].item():.6g}, expected {reference[index].item():.6g}"
    )


def check_product(single: SingleFactor, x: Tensor, factor: Tensor, bias: Tensor | None) -> str | None:
    """Hold one product against float64: |out - y| <= E + u(|y| + E) + eta, twice with equal bits."""
    mode, c = single.mode, single.pattern.c
    image = single.pack(factor)
    before = x.clone()
    out = single.run(x, image, bias)
    again = single.run(x, image, bias)
    if not torch.equal(out.view(torch.int8), again.view(torch.int8)):
        return "a second run differs"
    if not torch.equal(x, before):
        return "x has changed"
    reference = ks_einsum(x.double(), factor.double())
    scale = ks_einsum(x.double().abs(), factor.double().abs())
    if bias is not None:
        reference, scale, c = reference + bias.double(), scale + bias.double().abs(), c + 1
    steps = c * SUM_ERROR[mode] * (2 if mode == "fp32" else 1)
    growth = steps / (1 - steps)
    error = (INPUT_ERROR[mode] + (1 + INPUT_ERROR[mode]) * growth) * scale
    floor = 2.0**-24 if mode == "fp16" else 0.0
    if mode in ("tf32", "fp32"):
        largest = x.double().abs().unflatten(1, single.pattern.factor_shape[:1] + single.pattern.factor_shape[2:]).amax(2, keepdim=True)
        rest = 2.0**-33 * largest * factor.double().abs().amax() * c
        floor = rest.expand(-1, -1, single.pattern.b, -1).flatten(1)
    return first_wrong(out, reference, error + OUTPUT_ERROR[mode] * (reference.abs() + error) + floor)


def random_x(rows: int, pattern: Pattern, dtype: torch.dtype, kind: str, generator: torch.Generator) -> Tensor:
    """Rows of one kind: normal, ranges of magnitudes, single huge elements, zeros first, integers."""
    shape = (rows, pattern.in_features)
    if kind == "integer":
        return torch.randint(-1, 2, shape, generator=generator, device="cuda").to(dtype)
    x = torch.randn(shape, generator=generator, device="cuda")
    if kind == "ranges":
        low, high = (-20, 13) if dtype == torch.float32 else (-4, 5)
        x *= 2.0 ** torch.randint(low, high, (rows, 1), generator=generator, device="cuda")
    if kind == "huge":
        x[torch.arange(rows), torch.randint(0, pattern.in_features, (rows,), generator=generator, device="cuda")] = 1e30
    if kind == "zeros first":
        x.view(rows, pattern.a, pattern.c, pattern.d)[:, :, : pattern.c // 2] = 0
        x *= 1e-12
    if kind == "tiny":
        x *= 1e-34
    return x.to(dtype)


def check(_: argparse.Namespace) -> int:
    arch = device_arch(0)
    cases = [(pattern, mode) for pattern in grid_patterns() for mode in DTYPES]
    compile_all(
        {
            job
            for pattern, mode in cases
            for job in single_jobs(SingleFactor(pattern, mode), arch, pattern.a == 1 and mode in ("fp16", "fp32"))
        }
    )
    generator = torch.Generator("cuda").manual_seed(0)
    failures = count = 0
    for pattern, mode in cases:
        single, dtype = SingleFactor(pattern, mode), DTYPES[mode]
        kinds = ["normal", "integer", "ranges"] + (["huge", "zeros first", "tiny"] if dtype == torch.float32 else [])
        tests: list[tuple[str, int]] = [(kind, 129) for kind in kinds] + [("normal", 1), ("normal", 7), ("normal", 64), ("misaligned", 129)]
        tests += [("normal", 25088 + 128)] if pattern.a == 1 and pattern.in_features < 2000 else []
        for kind, rows in tests:
            if kind == "misaligned" and not (pattern.a == 1 and mode in ("fp16", "fp32")):
                continue
            x = random_x(rows, pattern, dtype, kind, generator)
            if kind == "misaligned":
                wide = torch.full((rows, pattern.in_features + 3), torch.nan, device="cuda", dtype=dtype)
                wide[:, 1 : 1 + pattern.in_features] = x
                x = wide[:, 1 : 1 + pattern.in_features]
            factor = torch.randn(pattern.factor_shape, generator=generator, device="cuda") / pattern.c**0.5
            factor = (factor.sign() if kind == "integer" else factor).to(dtype)
            bias = (
                torch.randn(pattern.out_features, generator=generator, device="cuda").to(dtype)
                if kind in ("normal", "misaligned")
                else None
            )
            count += 1
            try:
                problem = check_product(single, x, factor, bias)
                torch.cuda.synchronize()
            except Exception as error:
                problem = f"{type(error).__name__}: {str(error)[:300]}"
            if problem:
                failures += 1
                if failures <= 40:
                    print(f"FAIL {mode} {pattern} {kind} rows={rows}: {problem} | {config_to_json(single.tile.config)}", flush=True)
    failures += check_non_finite()
    failures += compare_errors()
    print(f"products: {count} cases, {failures} failures", flush=True)
    return failures


def check_non_finite() -> int:
    """One infinite or NaN element must make its outputs non-finite, and no others."""
    failures = 0
    pattern = Pattern(1, 64, 64, 4)
    for mode, value in itertools.product(DTYPES, (torch.inf, -torch.inf, torch.nan)):
        single = SingleFactor(pattern, mode)
        x = torch.randn((40, pattern.in_features), device="cuda").to(DTYPES[mode])
        x[5, 4 * 37 + 2] = value
        out = single.run(x, single.pack(torch.randn(pattern.factor_shape, device="cuda").to(DTYPES[mode])))
        expected = torch.ones_like(out, dtype=torch.bool)
        expected[5, 2::4] = False
        if not torch.equal(out.isfinite(), expected):
            failures += 1
            print(f"FAIL {mode}: {value} in x reaches {int((~out.isfinite()).sum())} outputs, expected {pattern.b}", flush=True)
    return failures


def compare_errors() -> int:
    """Relative rms errors of fp32 and tf32 against those of torch.bmm."""
    failures = 0
    for pattern in (Pattern(1, 192, 48, 2), Pattern(1, 384, 384, 1), Pattern(1, 1024, 1024, 2)):
        x, factor = torch.randn((4096, pattern.in_features), device="cuda"), torch.randn(pattern.factor_shape, device="cuda")
        reference = ks_einsum(x.double(), factor.double())

        def error(out: Tensor, reference: Tensor = reference) -> float:
            return float((out.double() - reference).norm() / reference.norm())

        torch.backends.cuda.matmul.allow_tf32 = False
        torch_error = error(bmm(x, to_blocks(factor), pattern))
        errors = {
            mode: error(single.run(x, single.pack(factor)))
            for mode in ("tf32", "fp32", "exact")
            for single in [SingleFactor(pattern, mode)]
        }
        failures += errors["fp32"] > 2 * torch_error
        print(f"errors {pattern}: torch fp32 {torch_error:.2e}, " + ", ".join(f"{mode} {e:.2e}" for mode, e in errors.items()), flush=True)
    return failures


def bmm(x: Tensor, blocks: Tensor, pattern: Pattern) -> Tensor:
    """Batched products with permuted copies, as Gonon et al. time them."""
    a, _, c, d = pattern.factor_shape
    columns = x.unflatten(-1, (a, c, d)).permute(1, 3, 0, 2).flatten(0, 1)
    return torch.bmm(columns, blocks.mT).unflatten(0, (a, d)).permute(2, 0, 3, 1).flatten(1)


def median_us(call: Callable[[], object], scratch: Tensor, repeats: int = 7) -> float:
    """Median time of a captured call with a cold L2 cache."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    times = []
    for _ in range(repeats):
        scratch.sum()  # reading leaves no lines in the cache that would have to be written back
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000)
    return statistics.median(times)


def timing(options: argparse.Namespace) -> int:
    arch = device_arch(0)
    patterns = random.Random(options.seed).sample(paper_patterns(), options.count)
    modes = options.modes.split(",")
    choices = {(p, mode): candidates(p, mode)[: options.candidates] for p in patterns for mode in modes if single_reason(p, mode) is None}
    compile_all({job for (p, mode), found in choices.items() for c in found for job in single_jobs(SingleFactor(p, mode, c), arch, False)})
    torch.backends.cuda.matmul.allow_tf32 = False
    scratch = torch.zeros(1 << 26, dtype=torch.int32, device="cuda")
    results = []
    for (pattern, mode), found in choices.items():
        dtype = DTYPES[mode]
        x = torch.randn((ROWS, pattern.in_features), device="cuda", dtype=dtype)
        factor = torch.randn(pattern.factor_shape, device="cuda", dtype=dtype)
        blocks = to_blocks(factor)
        rivals = {"bmm": lambda x=x, blocks=blocks, p=pattern: bmm(x, blocks, p), "einsum": lambda x=x, factor=factor: ks_einsum(x, factor)}
        if pattern.in_features * pattern.out_features <= 1 << 24:
            dense = factor_to_dense(factor)
            rivals["dense"] = lambda x=x, dense=dense: torch.nn.functional.linear(x, dense)
        row: dict[str, object] = {"pattern": list(pattern.factor_shape), "mode": mode}
        times = {}
        for name, call in rivals.items():
            try:
                times[name] = median_us(call, scratch)
            except torch.OutOfMemoryError:
                row[name] = "out of memory"
            torch.cuda.empty_cache()
        ours = []
        for config in found:
            single = SingleFactor(pattern, mode, config)
            image = single.pack(factor)
            ours.append(median_us(lambda single=single, x=x, image=image: single.run(x, image), scratch))
        best = min(range(len(ours)), key=ours.__getitem__)
        floor = x.element_size() * ROWS * (pattern.in_features + pattern.out_features) / 4.24e6
        rival = min(times["bmm"], times["einsum"])
        row |= {name: round(t, 1) for name, t in times.items()}
        row |= {"ours": [round(t, 1) for t in ours], "best": best, "floor": round(floor, 1), "ratio": round(ours[best] / rival, 3)}
        row["config"] = config_to_json(found[best])
        results.append(row)
        shown = " ".join(f"{name} {t:.0f}" for name, t in times.items())
        print(
            f"{mode} {pattern} ours {[round(t) for t in ours]} floor {floor:.0f} {shown} {row['ratio']} #{best} {compact(found[best])}",
            flush=True,
        )
        del x, factor, blocks, rivals
        torch.cuda.empty_cache()
    for mode in modes:
        ratios = [float(str(row["ratio"])) for row in results if row["mode"] == mode]
        first = [row for row in results if row["mode"] == mode]
        if ratios:
            wins = sum(r < 1 for r in ratios)
            loss = statistics.median(float(str(r["ours"][0])) / min(r["ours"]) for r in first)  # type: ignore[index, arg-type]
            print(
                f"{mode}: faster on {wins} of {len(ratios)}, median ratio {statistics.median(ratios):.3f}, first choice / best {loss:.2f}",
                flush=True,
            )
    if options.out:
        Path(options.out).write_text(json.dumps(results, indent=0))
    return 0


def compact(config: object) -> str:
    """A configuration on a short line."""
    return ",".join(str(int(v)) for v in vars(config).values())


def grad(_: argparse.Namespace) -> int:
    arch = device_arch(0)
    modes = ("fp16", "bf16", "tf32", "fp32")
    cases = [(p, mode) for p in grid_patterns() if p.a < 6 for mode in modes if grad_reason(p, mode) is None]
    jobs = set()
    for pattern, mode in cases:
        tile = GradTiling(pattern, mode, grad_configs(pattern, mode)[0])
        for vectors in ((tile.x_vector, tile.dy_vector), (tile.element_bytes, tile.dy_vector)):
            jobs |= {("factor_grad.cu", tuple(tile.defines(*vectors).items()), arch, name) for name in ("factor_grad", "factor_grad_sum")}
    compile_all(jobs)
    failures = count = 0
    for pattern, mode in cases:
        product, dtype = FactorGrad(pattern, mode), DTYPES[mode]
        for rows in (1, 7, 129, 5000):
            wide = torch.randn((rows, pattern.in_features + 1), device="cuda").to(dtype)
            x = wide[:, 1:] if rows == 7 else wide[:, 1:].contiguous()
            dy = (torch.randn((rows, pattern.out_features), device="cuda") * 2.0 ** torch.randint(-8, 9, (rows, 1), device="cuda")).to(
                dtype
            )
            count += 1
            try:
                out, again = product.run(x, dy), product.run(x, dy)
                left, right = (
                    dy.double().unflatten(1, (pattern.a, pattern.b, pattern.d)),
                    x.double().unflatten(1, (pattern.a, pattern.c, pattern.d)),
                )
                reference = torch.einsum("nipj,niqj->ipqj", left, right)
                scale = torch.einsum("nipj,niqj->ipqj", left.abs(), right.abs())
                steps = rows * 2.0**-23
                error = (INPUT_ERROR[mode] + 2 * steps) * scale
                problem = None if torch.equal(out, again) else "a second run differs"
                problem = problem or first_wrong(out, reference, error)
            except Exception as error:
                problem = f"{type(error).__name__}: {str(error)[:300]}"
            if problem:
                failures += 1
                if failures <= 30:
                    print(f"FAIL grad {mode} {pattern} rows={rows}: {problem} | {product.tile.config}", flush=True)
    print(f"gradients: {count} cases, {failures} failures", flush=True)
    scratch = torch.zeros(1 << 26, dtype=torch.int32, device="cuda")
    for pattern, mode in itertools.product(
        (
            Pattern(1, 192, 48, 2),
            Pattern(2, 48, 192, 1),
            Pattern(1, 768, 192, 2),
            Pattern(6, 64, 64, 1),
            Pattern(1, 128, 128, 3),
            Pattern(6, 64, 256, 1),
            Pattern(1, 96, 96, 4),
            Pattern(4, 96, 96, 1),
            Pattern(1, 384, 96, 4),
            Pattern(4, 96, 384, 1),
            Pattern(1, 384, 384, 1),
            Pattern(1, 64, 64, 16),
        ),
        ("bf16", "fp32"),
    ):
        x = torch.randn((ROWS, pattern.in_features), device="cuda").to(DTYPES[mode])
        dy = torch.randn((ROWS, pattern.out_features), device="cuda").to(DTYPES[mode])
        product = FactorGrad(pattern, mode)

        def rival(x: Tensor = x, dy: Tensor = dy, p: Pattern = pattern) -> Tensor:
            return torch.einsum("nipj,niqj->ipqj", dy.unflatten(1, (p.a, p.b, p.d)), x.unflatten(1, (p.a, p.c, p.d)))

        ours = median_us(lambda product=product, x=x, dy=dy: product.run(x, dy), scratch)
        floor = x.element_size() * ROWS * (pattern.in_features + pattern.out_features) / 4.24e6
        print(
            f"grad {mode} {pattern}: {ours:.0f} einsum {median_us(rival, scratch):.0f} floor {floor:.0f} {compact(product.tile.config)}",
            flush=True,
        )
    return failures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("check", "time", "grad"))
    parser.add_argument("--count", type=int, default=40, help="patterns to time")
    parser.add_argument("--candidates", type=int, default=4, help="configurations to time for each")
    parser.add_argument("--modes", default="fp16,fp32")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", help="JSON file for the rows of a timing run")
    options = parser.parse_args()
    sys.exit(1 if {"check": check, "time": timing, "grad": grad}[options.what](options) else 0)


if __name__ == "__main__":
    main()
