"""Launch the kernels on small shapes, for NVIDIA's compute-sanitizer to watch.

    compute-sanitizer --tool memcheck --error-exitcode 1 python recipes/sanitize_kernels.py
    compute-sanitizer --tool racecheck --error-exitcode 1 python recipes/sanitize_kernels.py --part 1/4

Numbers of rows are no multiples of anything; sizes are off the tiles where the kernel takes such. Kernels whose blocks stay for
more rows run on enough of them for a second round too. Prints what was launched. The tools are slow: ``--part 1/4`` takes every
fourth case from the first on, so that four processes share the work, and --quick every sixteenth.

What the tools said: recipes/results/sanitizer_h200.txt.

Needs a CUDA device and NVIDIA's compute-sanitizer.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial

import recipe
import torch

from flysurgery.gpu.attention import run_attention
from flysurgery.gpu.dense import run_dense, run_dense_gated
from flysurgery.gpu.dense_patches import run_patches
from flysurgery.gpu.factor_gradients import factor_gradients
from flysurgery.gpu.few_rows import run_few_rows
from flysurgery.gpu.ffn import run_ffn
from flysurgery.gpu.fused import FusedLinear
from flysurgery.gpu.fused_configs import configs
from flysurgery.gpu.fused_linears import run_fused_linears
from flysurgery.gpu.gated import run_gated
from flysurgery.gpu.kernel import device_arch
from flysurgery.gpu.layer_norm import run_layer_norm
from flysurgery.gpu.modes import HALF_MODES, dtype_of
from flysurgery.gpu.obstacles import shared_limit_of
from flysurgery.gpu.product import product_of
from flysurgery.gpu.single import SingleFactor
from flysurgery.gpu.some_rows import run_some_rows
from flysurgery.gpu.tiling import Tiling, tiling
from flysurgery.gpu.transposition import Transposition
from flysurgery.gpu.wide_ffn import run_wide_ffn
from flysurgery.ops.parts import Norm
from flysurgery.patterns import Architecture, Pattern
from flysurgery.patterns.catalog import gonon, monarch

ROWS, LINEARS = (1, 75), 3
SMALL = Architecture.of((1, 32, 16, 2), (2, 16, 32, 1))
UNCHAINED = Architecture.of((1, 32, 32, 3), (6, 16, 24, 1))
UP, DOWN = Architecture.of((2, 96, 32, 2), (2, 32, 24, 2)), Architecture.of((1, 32, 32, 3), (3, 32, 128, 1))
JOINED = Architecture.of((1, 256, 128, 3), (2, 192, 64, 1)), Architecture.of((1, 64, 128, 2), (2, 128, 384, 1))
"""Both factors around the activation are one launch, where rows fill its rounds."""
ODD = Pattern(2, 19, 37, 3)


def factors_of(architecture: Architecture, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    return tuple(torch.randn(pattern.factor_shape, device="cuda").to(dtype) for pattern in architecture)


def blocks_at_once() -> int:
    """Blocks of the kernels that have a multiprocessor for themselves."""
    return torch.cuda.get_device_properties(0).multi_processor_count


def rows_of_two_rounds() -> int:
    """More than three warpgroups a block take in their first round."""
    return 192 * blocks_at_once() + 75


def run_fused(architecture: Architecture, mode: str, linears: int, all_rows: Sequence[int] = ROWS, *, norm: bool = False) -> None:
    dtype = dtype_of(mode)
    tile = tiling(architecture, mode, linears, norm=norm)
    assert isinstance(tile, Tiling), tile
    for wgmma in {False, device_arch(0) == "sm_90a"}:
        config = configs(tile, shared_limit_of(0), wgmma=wgmma)[0]
        layer = FusedLinear(architecture, mode, linears, config=config, norm=norm, device_index=0)
        left, right = factors_of(architecture, dtype)
        image = layer.pack([(left, right)] * linears)
        for rows in all_rows:
            x = torch.randn((rows, architecture.in_features), device="cuda").to(dtype)
            wide = torch.randn((rows, linears * architecture.out_features), device="cuda").to(dtype)
            layer.run(x, image)
            layer.run(x, image, wide[0].clone(), wide, "gelu")
        print(f"fused {mode} {architecture} x {linears}, wgmma={config.wgmma}, norm={norm}, rows {all_rows}")


def run_gates(mode: str) -> None:
    dtype = dtype_of(mode)
    left, right = factors_of(SMALL, dtype)
    weights = [torch.randn((64, 64), device="cuda").to(dtype) for _ in range(2)]
    for rows in ROWS:
        x = torch.randn((rows, SMALL.in_features), device="cuda").to(dtype)
        for eps in (None, 1e-6):
            run_fused_linears(x, None, None, eps, (left, right), (), 1, "silu", None, None, mode)
        run_dense_gated(x, weights, [weight[0] for weight in weights], 0, "gelu", mode)
        run_gated(x[:, :32], x[:, 32:], "silu")
    print(f"gates {mode}")


def run_single(pattern: Pattern, mode: str) -> None:
    dtype = dtype_of(mode)
    single = SingleFactor(pattern, mode, shared_limit=shared_limit_of(0))
    factor = torch.randn(pattern.factor_shape, device="cuda").to(dtype)
    image = single.pack(factor)
    for rows in ROWS:
        single.run(torch.randn((rows, pattern.in_features), device="cuda").to(dtype), image)
    print(f"single {mode} {pattern}")


def run_dense_layer(mode: str) -> None:
    dtype = dtype_of(mode)
    weight, bias = torch.randn((96, 192), device="cuda").to(dtype), torch.randn(96, device="cuda").to(dtype)
    for rows in ROWS:
        x, residual = (torch.randn((rows, size), device="cuda").to(dtype) for size in (192, 96))
        run_dense(x, weight, bias, "gelu", residual, bias, mode)
    shapes = (2, 3, 32, 48), (96, 3, 16, 16), (1, 7, 96), (1, 1, 96)
    images, kernel, position, token = (torch.randn(shape, device="cuda").to(dtype) for shape in shapes)
    run_patches(images, kernel, bias, None, [], mode)
    run_patches(images, kernel, bias, position, [token], mode)
    print(f"dense {mode}")


def run_streamed(mode: str) -> None:
    """Inputs of which a wide tile's weights do not stay in shared memory, and rows enough for all multiprocessors."""
    dtype, rows = dtype_of(mode), rows_of_two_rounds()
    weight, bias = torch.randn((192, 640), device="cuda").to(dtype), torch.randn(192, device="cuda").to(dtype)
    x, residual = (torch.randn((rows, size), device="cuda").to(dtype) for size in (640, 192))
    run_dense(x, weight, bias, "gelu", residual, bias, mode)
    print(f"dense, streamed weights, {mode}")


def run_by_factors(
    dtype: torch.dtype, all_rows: Sequence[int] = ROWS, architectures: tuple[Architecture, Architecture] = (UP, DOWN)
) -> None:
    if device_arch(0) != "sm_90a":
        return
    features = architectures[0].in_features
    for rows in all_rows:
        x, bias = (torch.randn(shape, device="cuda").to(dtype) for shape in ((rows, features), (features,)))
        up, down = (factors_of(architecture, dtype) for architecture in architectures)
        run_wide_ffn(x, Norm(bias, bias), up, None, down, bias, "gelu", bias, residual=True)
    print(f"by factors {dtype} {architectures[0]} {architectures[1]}, rows {all_rows}")


def run_feed_forward(architectures: tuple[Architecture, Architecture], dtype: torch.dtype, all_rows: Sequence[int] = ROWS) -> None:
    if device_arch(0) != "sm_90a":
        return
    up, down = (factors_of(architecture, dtype) for architecture in architectures)
    features = architectures[1].out_features
    bias = torch.randn(features, device="cuda").to(dtype)
    for rows in all_rows:
        x = torch.randn((rows, features), device="cuda").to(dtype)
        run_ffn(x, bias, bias, 1e-6, up, None, down, bias, "gelu", bias, True)
        run_ffn(x, None, None, None, up, None, down, None, "gelu_tanh", None, False)
    print(f"feed-forward {dtype} {architectures[0]} {architectures[1]}, rows {all_rows}")


def run_float_feed_forward(architectures: tuple[Architecture, Architecture], mode: str, all_rows: Sequence[int] = ROWS) -> None:
    if device_arch(0) != "sm_90a":
        return
    torch.backends.cuda.matmul.allow_tf32 = mode == "tf32"
    up, down = (factors_of(architecture, torch.float32) for architecture in architectures)
    bias = torch.randn(architectures[1].out_features, device="cuda")
    for rows in all_rows:
        x = torch.randn((rows, len(bias)), device="cuda")
        run_ffn(x, bias, bias, 1e-6, up, None, down, bias, "gelu", bias, True)
        run_ffn(x, None, None, 1e-6, up, None, down, None, "gelu_tanh", None, False)
    print(f"feed-forward {mode} {architectures[0]} {architectures[1]}, rows {all_rows}")


def run_attention_layer(mode: str) -> None:
    if device_arch(0) != "sm_90a":
        return
    for tokens, heads in ((1, 2), (75, 2), (197, blocks_at_once() // 2 + 1)):
        q, k, v = torch.randn((2, tokens, 3, heads, 64), device="cuda").to(dtype_of(mode)).permute(2, 0, 3, 1, 4)
        run_attention(q, k, v, 0.125, mode, few=False)
    print(f"attention {mode}")


def run_few(dtype: torch.dtype) -> None:
    weight, bias = torch.randn((96, 192), device="cuda").to(dtype), torch.randn(96, device="cuda").to(dtype)
    for rows in ROWS:
        x, residual = (torch.randn((rows, size), device="cuda").to(dtype) for size in (192, 96))
        heads = torch.randn((1, 2, rows, 64), device="cuda").to(dtype)
        for _ in range(2):  # the second begins early
            run_few_rows(x, None, None, 1e-6, [weight], [0], [bias], "gelu", residual, bias)
            run_few_rows(x, None, None, None, [weight], [0], [bias], "none", None, None)
            run_attention(heads, heads, heads, 0.125, HALF_MODES[dtype], few=True)
    print(f"few rows and queries {dtype}")


def run_some(mode: str) -> None:
    """Sums of warpgroups and of blocks that meet, and each of a block by itself."""
    dtype = dtype_of(mode)
    for inputs, outputs in ((192, 96), (1536, 96)):
        weight, bias = torch.randn((outputs, inputs), device="cuda").to(dtype), torch.randn(outputs, device="cuda").to(dtype)
        for rows in ROWS:
            x, residual = (torch.randn((rows, size), device="cuda").to(dtype) for size in (inputs, outputs))
            for _ in range(2):  # the second begins early
                run_some_rows(x, [weight], [0], [bias], "gelu", residual, bias, mode)
    print(f"some hundred rows {mode}")


def run_factor_gradients(dtype: torch.dtype) -> None:
    for architecture in (SMALL, UNCHAINED):
        factors = [factor for _ in range(LINEARS) for factor in factors_of(architecture, dtype)]
        dw = torch.randn((LINEARS * architecture.out_features, architecture.in_features), device="cuda")
        factor_gradients(dw, factors, LINEARS)
    print(f"gradients of factors {dtype}")


def run_norm(dtype: torch.dtype) -> None:
    for rows in ROWS:
        run_layer_norm(torch.randn((rows, 96), device="cuda").to(dtype), None, None, 1e-6)
    print(f"norm {dtype}")


def run_transposition(dtype: torch.dtype) -> None:
    for matrices, slow, fast in ((3, 19, 37), (2, 136, 72), (2, 24, 4)):
        for rows in ROWS:
            x = torch.randn((rows, matrices * slow * fast), device="cuda").to(dtype)
            Transposition(matrices, slow, fast).run(x, torch.empty_like(x), x[0])
    print(f"transposition {dtype}")


def run_gather(mode: str) -> None:
    product = product_of(SMALL, mode, 1, 0, 75)
    factors = factors_of(SMALL, torch.float32)
    for values in (factors, factors):  # the first call learns the table
        product.pack(tuple(values), (), transposed=False)
    print(f"gather {mode}")


def cases() -> list[Callable[[], None]]:
    """All of the above, by modes and patterns."""
    found: list[Callable[[], None]] = []
    for mode in ("fp16", "bf16", "tf32", "fp32"):
        found += [partial(run_fused, SMALL, mode, 1), partial(run_single, ODD, mode), partial(run_dense_layer, mode)]
        found += [partial(run_gates, mode)]
        found += [partial(run_some, mode)] if device_arch(0) == "sm_90a" else []
    for mode in ("fp16", "fp32"):
        found += [partial(run_fused, SMALL, mode, 3), partial(run_fused, SMALL, mode, 3, norm=True), partial(run_fused, UNCHAINED, mode, 1)]
        found += [partial(run_fused, SMALL, mode, 1, (rows_of_two_rounds(),)), partial(run_single, Pattern(1, 48, 64, 1), mode)]
    found += [partial(run_attention_layer, mode) for mode in ("fp16", "bf16", "tf32", "fp32")]
    for mode in ("tf32", "fp32"):
        found += [partial(run_float_feed_forward, (named(768, 192), named(192, 768)), mode) for named in (gonon, monarch)]
        found += [partial(run_float_feed_forward, (gonon(768, 192), gonon(192, 768)), mode, (128 * blocks_at_once() + 75,))]
    found += [partial(run_single, ODD, "exact")]
    for mode in ("fp16", "bf16"):
        dtype = dtype_of(mode)
        found += [partial(run_feed_forward, (named(768, 192), named(192, 768)), dtype) for named in (gonon, monarch)]
        found += [partial(run_gather, mode), partial(run_by_factors, dtype), partial(run_few, dtype)]
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        found += [partial(run_transposition, dtype), partial(run_norm, dtype), partial(run_factor_gradients, dtype)]
    found += [partial(run_feed_forward, (gonon(768, 192), gonon(192, 768)), torch.float16, (rows_of_two_rounds(),))]
    found += [partial(run_by_factors, torch.float16, (rows_of_two_rounds(),)), partial(run_streamed, "fp16")]
    found += [partial(run_by_factors, torch.float16, (75, 2 * 192 * blocks_at_once() - 75), JOINED)]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", help="such as 2/4: every fourth case from the second on")
    parser.add_argument("--quick", action="store_true", help="the same as --part 1/16")
    options = parser.parse_args()
    part = options.part or ("1/16" if options.quick else "1/1")
    first, _, step = part.partition("/")
    if not (first.isdecimal() and step.isdecimal() and 1 <= int(first) <= int(step)):
        parser.error(f"expected a part such as 2/4, got '{part}'; give the first case, a slash, and how many parts there are")
    recipe.need_cuda()
    torch.manual_seed(0)
    for case in cases()[int(first) - 1 :: int(step)]:
        case()
    torch.cuda.synchronize()


if __name__ == "__main__":
    main()
