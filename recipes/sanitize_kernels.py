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

from collections.abc import Callable, Sequence
from typing import Any

import recipe
import torch

from flysurgery.gpu.attention import run_attention
from flysurgery.gpu.dense import run_dense, run_dense_gated
from flysurgery.gpu.dense_patches import run_patches
from flysurgery.gpu.device import shared_limit_of
from flysurgery.gpu.factor_gradients import factor_gradients
from flysurgery.gpu.few_rows import run_few_rows
from flysurgery.gpu.ffn import run_ffn
from flysurgery.gpu.fused import FusedLinear
from flysurgery.gpu.fused_configs import configs
from flysurgery.gpu.fused_linears import run_fused_linears
from flysurgery.gpu.gated import run_gated
from flysurgery.gpu.layer_norm import run_layer_norm
from flysurgery.gpu.modes import dtype_of
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


def drawn(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda").to(dtype)


def factors_of(architecture: Architecture, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    return tuple(drawn(dtype, *pattern.factor_shape) for pattern in architecture)


def blocks_at_once() -> int:
    """Blocks of the kernels that have a multiprocessor for themselves."""
    return torch.cuda.get_device_properties(0).multi_processor_count


def rows_of_two_rounds() -> int:
    """More than three warpgroups a block take in their first round."""
    return 192 * blocks_at_once() + 75


def run_fused(architecture: Architecture, mode: str, linears: int, all_rows: Sequence[int] = ROWS, norm: bool = False) -> None:
    dtype = dtype_of(mode)
    tile = tiling(architecture, mode, linears, norm=norm)
    assert isinstance(tile, Tiling), tile
    config = configs(tile, shared_limit_of(0))[0]
    layer = FusedLinear(architecture, mode, linears, config=config, norm=norm, device_index=0)
    left, right = factors_of(architecture, dtype)
    image = layer.pack([(left, right)] * linears)
    for rows in all_rows:
        x = drawn(dtype, rows, architecture.in_features)
        wide = drawn(dtype, rows, linears * architecture.out_features)
        layer.run(x, image)
        layer.run(x, image, wide[0].clone(), wide, "gelu")


def run_gates(mode: str) -> None:
    dtype = dtype_of(mode)
    left, right = factors_of(SMALL, dtype)
    weights = [drawn(dtype, 64, 64) for _ in range(2)]
    for rows in ROWS:
        x = drawn(dtype, rows, SMALL.in_features)
        for eps in (None, 1e-6):
            run_fused_linears(x, None if eps is None else (None, None, eps), [(left, right)], (), 1, "silu", None, None, mode)
        run_dense_gated(x, weights, [weight[0] for weight in weights], 0, "gelu", mode)
        run_gated(x[:, :32], x[:, 32:], "silu")


def run_single(pattern: Pattern, mode: str) -> None:
    dtype = dtype_of(mode)
    single = SingleFactor(pattern, mode, shared_limit=shared_limit_of(0))
    factor = drawn(dtype, *pattern.factor_shape)
    image = single.pack(factor)
    for rows in ROWS:
        single.run(drawn(dtype, rows, pattern.in_features), image)


def run_dense_layer(mode: str) -> None:
    dtype = dtype_of(mode)
    weight, bias = drawn(dtype, 96, 192), drawn(dtype, 96)
    for rows in ROWS:
        x, residual = (drawn(dtype, rows, size) for size in (192, 96))
        run_dense(x, weight, bias, "gelu", residual, bias, mode)
    run_patches(drawn(dtype, 2, 3, 32, 48), drawn(dtype, 96, 3, 16, 16), bias, mode)


def run_streamed(mode: str) -> None:
    """Inputs of which a wide tile's weights do not stay in shared memory, and rows enough for all multiprocessors."""
    dtype, rows = dtype_of(mode), rows_of_two_rounds()
    weight, bias = drawn(dtype, 192, 640), drawn(dtype, 192)
    x, residual = (drawn(dtype, rows, size) for size in (640, 192))
    run_dense(x, weight, bias, "gelu", residual, bias, mode)


def run_by_factors(mode: str, all_rows: Sequence[int] = ROWS, architectures: tuple[Architecture, Architecture] = (UP, DOWN)) -> None:
    dtype, features = dtype_of(mode), architectures[0].in_features
    for rows in all_rows:
        x, bias = drawn(dtype, rows, features), drawn(dtype, features)
        up, down = (factors_of(architecture, dtype) for architecture in architectures)
        run_wide_ffn(x, Norm(bias, bias), up, None, down, bias, "gelu", bias, residual=True)


def run_feed_forward(family: Callable[[int, int], Architecture], mode: str, all_rows: Sequence[int] = ROWS) -> None:
    dtype = dtype_of(mode)
    torch.backends.cuda.matmul.allow_tf32 = mode == "tf32"
    up, down = (factors_of(family(*sizes), dtype) for sizes in ((768, 192), (192, 768)))
    bias = drawn(dtype, 192)
    for rows in all_rows:
        x = drawn(dtype, rows, 192)
        run_ffn(x, (bias, bias, 1e-6), up, None, down, bias, "gelu", bias, True)
        run_ffn(x, (None, None, 1e-6) if dtype == torch.float32 else None, up, None, down, None, "gelu_tanh", None, False)


def run_attentions(mode: str) -> None:
    """Of short sequences, and of halves in one that is longer."""
    dtype, many = dtype_of(mode), blocks_at_once() // 2 + 1
    for tokens, heads in ((1, 2), (75, 2), (197, many), *(() if dtype == torch.float32 else ((300, many),))):
        q, k, v = drawn(dtype, 2, tokens, 3, heads, 64).permute(2, 0, 3, 1, 4)
        run_attention(q, k, v, 0.125, mode, few=False)


def run_few(mode: str) -> None:
    dtype = dtype_of(mode)
    weight, bias = drawn(dtype, 96, 192), drawn(dtype, 96)
    for rows in ROWS:
        x, residual = (drawn(dtype, rows, size) for size in (192, 96))
        heads = drawn(dtype, 1, 2, rows, 64)
        for _ in range(2):  # the second begins early
            run_few_rows(x, (None, None, 1e-6), [weight], [bias], "gelu", residual, bias)
            run_few_rows(x, None, [weight], [bias], "none", None, None)
            run_attention(heads, heads, heads, 0.125, mode, few=True)


def run_some(mode: str) -> None:
    """Sums of warpgroups and of blocks that meet, and each of a block by itself."""
    dtype = dtype_of(mode)
    for inputs, outputs in ((192, 96), (1536, 96)):
        weight, bias = drawn(dtype, outputs, inputs), drawn(dtype, outputs)
        for rows in ROWS:
            x, residual = (drawn(dtype, rows, size) for size in (inputs, outputs))
            for _ in range(2):  # the second begins early
                run_some_rows(x, [weight], [bias], "gelu", residual, bias, mode)


def run_factor_gradients(mode: str) -> None:
    for architecture in (SMALL, UNCHAINED):
        factors = [factor for _ in range(LINEARS) for factor in factors_of(architecture, dtype_of(mode))]
        factor_gradients(drawn(torch.float32, LINEARS * architecture.out_features, architecture.in_features), factors, LINEARS)


def run_norm(mode: str) -> None:
    for rows in ROWS:
        run_layer_norm(drawn(dtype_of(mode), rows, 96), None, None, 1e-6)


def run_transposition(mode: str) -> None:
    for matrices, slow, fast in ((3, 19, 37), (2, 136, 72), (2, 24, 4)):
        for rows in ROWS:
            x = drawn(dtype_of(mode), rows, matrices * slow * fast)
            Transposition(matrices, slow, fast).run(x, torch.empty_like(x), x[0])


def run_gather(mode: str) -> None:
    product = product_of(SMALL, mode, 1, 0, 75)
    factors = factors_of(SMALL, torch.float32)
    for values in (factors, factors):  # the first call learns the table
        product.pack(values, (), transposed=False)


Case = tuple[Callable[..., None], tuple[Any, ...]]


def cases() -> list[Case]:
    """All of the above, by modes and patterns."""
    many = (rows_of_two_rounds(),)
    found: list[Case] = []
    for mode in ("fp16", "bf16", "tf32", "fp32"):
        found += [(run_fused, (SMALL, mode, 1)), (run_single, (ODD, mode)), (run_dense_layer, (mode,))]
        found += [(run_gates, (mode,))]
    for mode in ("fp16", "fp32"):
        found += [(run_fused, (SMALL, mode, 3)), (run_fused, (SMALL, mode, 3, ROWS, True)), (run_fused, (UNCHAINED, mode, 1))]
        found += [(run_fused, (SMALL, mode, 1, many)), (run_single, (Pattern(1, 48, 64, 1), mode))]
    found += [(run_streamed, ("fp16",))]
    found += [(run, (mode,)) for mode in ("fp16", "bf16") for run in (run_gather, run_few)]
    found += [(run, (mode,)) for mode in ("fp16", "bf16", "fp32") for run in (run_transposition, run_norm, run_factor_gradients)]
    for mode in ("fp16", "bf16", "tf32", "fp32"):
        found += [(run_some, (mode,)), (run_attentions, (mode,)), *((run_feed_forward, (family, mode)) for family in (gonon, monarch))]
    found += [(run_feed_forward, (gonon, mode, (128 * blocks_at_once() + 75,))) for mode in ("tf32", "fp32")]
    found += [(run_feed_forward, (gonon, "fp16", many)), (run_by_factors, ("fp16",)), (run_by_factors, ("bf16",))]
    found += [(run_by_factors, ("fp16", many)), (run_by_factors, ("fp16", (75, 2 * 192 * blocks_at_once() - 75), JOINED))]
    return found


def main() -> None:
    parser = recipe.parser_of(__doc__)
    parser.add_argument("--part", help="such as 2/4: every fourth case from the second on")
    parser.add_argument("--quick", action="store_true", help="the same as --part 1/16")
    options = parser.parse_args()
    part = options.part or ("1/16" if options.quick else "1/1")
    first, _, step = part.partition("/")
    if not (first.isdecimal() and step.isdecimal() and 1 <= int(first) <= int(step)):
        parser.error(f"expected a part such as 2/4, got '{part}'; give the first case, a slash, and how many parts there are")
    if not torch.cuda.is_available():
        raise SystemExit("this needs a CUDA device, and PyTorch finds none")
    torch.manual_seed(0)
    for run, arguments in cases()[int(first) - 1 :: int(step)]:
        run(*arguments)
        print(run.__name__.removeprefix("run_"), *(getattr(each, "__name__", each) for each in arguments))
    torch.cuda.synchronize()


if __name__ == "__main__":
    recipe.main(main)
