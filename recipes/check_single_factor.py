"""Check the single-factor kernel and the factor gradient on a CUDA device, element by element against float64.

    python recipes/check_single_factor.py
    python recipes/check_single_factor.py --every 3    # every third pattern of the grid; --quick takes every twentieth

Failing cases are printed with the first wrong index; the exit status is 1 if there are any.
"""

from __future__ import annotations

import argparse
import itertools
import sys

import recipe
import torch
from single_factor_cases import DTYPES, bmm, compile_all, grad_jobs, grid_patterns, random_x, single_jobs
from torch import Tensor

from flysurgery.factors import ks_einsum, to_blocks
from flysurgery.ops.cuda.factor_grad import FactorGrad, grad_reason, gradient_configs
from flysurgery.ops.cuda.kernel import device_arch
from flysurgery.ops.cuda.obstacles import shared_limit_of
from flysurgery.ops.cuda.single import SingleFactor
from flysurgery.patterns import Pattern

QUICK_EVERY = 20
INPUT_ERROR = {"fp16": 0.0, "bf16": 0.0, "tf32": 2.0**-10 + 2.0**-22, "fp32": 3 * 2.0**-22, "exact": 0.0}
OUTPUT_ERROR = {"fp16": 2.0**-11, "bf16": 2.0**-8, "tf32": 0.0, "fp32": 0.0, "exact": 0.0}
SUM_ERROR = {"fp16": 2.0**-23, "bf16": 2.0**-23, "tf32": 2.0**-23, "fp32": 2.0**-23, "exact": 2.0**-24}


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


def check_products(every: int) -> int:
    """All modes and kinds of input on every so many-th pattern of the grid."""
    arch = device_arch(0)
    cases = [(pattern, mode) for pattern in itertools.islice(grid_patterns(), 0, None, every) for mode in DTYPES]
    compile_all(
        {
            job
            for pattern, mode in cases
            for job in single_jobs(
                SingleFactor(pattern, mode, shared_limit=shared_limit_of(0)), arch, pattern.a == 1 and mode in ("fp16", "fp32")
            )
        }
    )
    generator = torch.Generator("cuda").manual_seed(0)
    failures = count = 0
    for pattern, mode in cases:
        single, dtype = SingleFactor(pattern, mode, shared_limit=shared_limit_of(0)), DTYPES[mode]
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
                    print(f"FAIL {mode} {pattern} {kind} rows={rows}: {problem} | {single.tile.config}", flush=True)
    failures += check_non_finite()
    failures += compare_errors()
    print(f"products: {count} cases, {failures} failures", flush=True)
    return failures


def check_non_finite() -> int:
    """One infinite or NaN element must make its outputs non-finite, and no others."""
    failures = 0
    pattern = Pattern(1, 64, 64, 4)
    for mode, value in itertools.product(DTYPES, (torch.inf, -torch.inf, torch.nan)):
        single = SingleFactor(pattern, mode, shared_limit=shared_limit_of(0))
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
            for single in [SingleFactor(pattern, mode, shared_limit=shared_limit_of(0))]
        }
        failures += errors["fp32"] > 2 * torch_error
        print(f"errors {pattern}: torch fp32 {torch_error:.2e}, " + ", ".join(f"{mode} {e:.2e}" for mode, e in errors.items()), flush=True)
    return failures


def check_gradients(every: int) -> int:
    """All modes, a tiny batch and a misaligned one among them, on every so many-th pattern of the grid."""
    arch = device_arch(0)
    modes = ("fp16", "bf16", "tf32", "fp32")
    patterns = itertools.islice(grid_patterns(), 0, None, every)
    cases = [(p, mode) for p in patterns for mode in modes if grad_reason(p, mode, shared_limit_of(0)) is None]
    limit, wgmma = shared_limit_of(0), arch == "sm_90a"
    configs = [(case, {gradient_configs(*case, limit, wgmma=either)[0] for either in {False, wgmma}}) for case in cases]
    products = [FactorGrad(*case, config, shared_limit=limit) for case, found in configs for config in found]
    compile_all({job for product in products for job in grad_jobs(product, arch, True)})
    failures = count = 0
    for product in products:
        pattern, mode, dtype = product.pattern, product.mode, DTYPES[product.mode]
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
    return failures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--every", type=recipe.count, help="take every so many-th pattern of the grid")
    parser.add_argument("--quick", action="store_true", help=f"the same as --every {QUICK_EVERY}")
    options = parser.parse_args()
    every = options.every or (QUICK_EVERY if options.quick else 1)
    recipe.need_cuda()
    sys.exit(1 if check_products(every) + check_gradients(every) else 0)


if __name__ == "__main__":
    recipe.main(main)
