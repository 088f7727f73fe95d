"""Each kernel that multiplies by a dense matrix, by all levels of the tolerance policy."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from flysurgery.factors import factors_to_dense
from flysurgery.ops import Dense, FeedForward, LinearResidual, Norm, NormLinears, ks_linear, run
from flysurgery.patterns import Architecture, Pattern, gonon, monarch
from tests.gpu.dense_kernels import KERNELS, SHARED_BYTES, SQUARE, DenseKernel, tilings_by
from tests.support.levels import check_bound, check_identity, check_integers, check_layer
from tests.support.oracle import ACTIVATIONS, product
from tests.support.problems import INPUTS, make_factor, make_factors, make_input, make_integers, make_vector
from tests.support.tolerance import assert_epilogue_bounded, assert_epilogue_comparable, assert_equal

OF_SEVERAL = [kernel for kernel in KERNELS if kernel.kind in ("few rows", "some rows") and kernel.tile is None]
"""Those that take several linears, and factors, which they multiply out."""
EARLY = [kernel for kernel in KERNELS if kernel in OF_SEVERAL or (kernel.tile is not None and kernel.tile[-1] > 1)]
"""Those that begin while the one before still runs, and of several blocks that share the inputs."""

every = pytest.mark.parametrize("kernel", KERNELS, ids=str, indirect=True)
of_several = pytest.mark.parametrize("kernel", OF_SEVERAL, ids=str, indirect=True)


def each_pattern(*columns: str) -> pytest.MarkDecorator:
    """Every kernel and every layer it is tried on; and every number of rows, where that is asked for."""
    cases = [(kernel, pattern) for kernel in KERNELS for pattern in kernel.patterns]
    if "rows" in columns:
        cases = [(*case, rows) for case in cases for rows in case[0].rows]
    return pytest.mark.parametrize(("kernel", "pattern", *columns), cases, ids=str, indirect=["kernel"])


def plainly(x: Tensor, factors: Sequence[Tensor], bias: Tensor | None) -> Tensor:
    return ks_linear(x, factors, bias, backend="bmm")


@pytest.mark.parametrize("kernel", KERNELS, ids=str)
def test_the_tiles_are_those_of_the_kernel(kernel: DenseKernel) -> None:
    for pattern in kernel.patterns:
        assert kernel.tile is None or tilings_by(kernel.tile, pattern.c, pattern.b, kernel.mode, SHARED_BYTES)


@pytest.mark.gpu
@each_pattern()
def test_exact_data(kernel: DenseKernel, pattern: Pattern) -> None:
    check_identity(kernel.run, pattern, kernel.arithmetic, "cuda")
    check_integers(kernel.run, Architecture((pattern,)), 131, kernel.arithmetic, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("kind", INPUTS)
@every
def test_every_element_is_bounded(kernel: DenseKernel, kind: str) -> None:
    longest = max(kernel.patterns, key=lambda pattern: pattern.c)
    check_bound(kernel.run, kind, longest, 77, kernel.arithmetic, "cuda")


@pytest.mark.gpu
@each_pattern("rows")
def test_as_accurate_as_pytorch(kernel: DenseKernel, pattern: Pattern, rows: int) -> None:
    check_layer(kernel.run, plainly, Architecture((pattern,)), rows, kernel.arithmetic, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("architecture", [gonon(384, 384), monarch(1536, 384)], ids=str)
@of_several
def test_factors_are_multiplied_out_and_rounded_once(kernel: DenseKernel, architecture: Architecture) -> None:
    arithmetic = kernel.arithmetic
    check_integers(kernel.run, architecture, 0, arithmetic, "cuda")
    factors, bias = make_factors(architecture, arithmetic, device="cuda"), make_vector(architecture.out_features, arithmetic, device="cuda")
    x = make_input(150, architecture.in_features, arithmetic, device="cuda")
    weight = factors_to_dense([factor.double() for factor in factors]).to(arithmetic.dtype)
    assert_equal(kernel.run(x, factors, bias), kernel.run(x, [weight[None, :, :, None]], bias))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("kernel", "activation", "with_residual"),
    [(kernel, name, (place + n) % 2 == 1) for place, kernel in enumerate(KERNELS) for n, name in enumerate(ACTIVATIONS)],
    ids=str,
    indirect=["kernel"],
)
def test_epilogues(kernel: DenseKernel, activation: str, with_residual: bool) -> None:
    """Each kernel with each activation, and each of its activations with a residual in every other of its modes."""
    arithmetic, compute, (pattern, *_) = kernel.arithmetic, ACTIVATIONS[activation], kernel.patterns
    x, factor = make_input(333, pattern.c, arithmetic, device="cuda"), make_factor(pattern, arithmetic, device="cuda")
    bias = make_vector(pattern.b, arithmetic, device="cuda")
    residual = make_input(333, pattern.b, arithmetic, device="cuda") if with_residual else None
    out = kernel.linear(x, factor, bias, activation, residual)
    yardstick, truth = compute(plainly(x, [factor], bias)), compute(product(x, [factor], bias))
    if residual is not None:
        yardstick, truth = yardstick + residual, truth + residual.double()
    assert_epilogue_bounded(out, x, [factor], bias, compute, residual, arithmetic)
    assert_epilogue_comparable(out, yardstick, truth, arithmetic)


@pytest.mark.gpu
@every
def test_a_small_layer_scale_does_not_vanish(kernel: DenseKernel) -> None:
    """Of integers: in float16 a weight times this scale is 0, and the results, multiples of 2^-24, are exact."""
    pattern, *_ = kernel.patterns
    x = make_integers((200, pattern.c), seed=1, mode=kernel.arithmetic, device="cuda") * 4
    factor = make_integers(pattern.factor_shape, seed=2, mode=kernel.arithmetic, device="cuda")
    scale = torch.full((pattern.b,), 2.0**-26, device="cuda")
    assert_equal(kernel.linear(x, factor, scale=scale), product(x, [factor]) * 2.0**-26)


@pytest.mark.gpu
@every
def test_any_number_of_rows_strided_or_not(kernel: DenseKernel) -> None:
    arithmetic, (pattern, *_) = kernel.arithmetic, kernel.patterns
    factor, bias = make_factor(pattern, arithmetic, device="cuda"), make_vector(pattern.b, arithmetic, device="cuda")
    x, residual = (make_input(431, size + 16, arithmetic, device="cuda")[:, :size] for size in (pattern.c, pattern.b))
    whole = kernel.linear(x.contiguous(), factor, bias, residual=residual.contiguous())
    for rows in (0, 1, 7, 64, 129, 197, 231, 431):
        assert_equal(kernel.linear(x[:rows], factor, bias, residual=residual[:rows]), whole[:rows])


@pytest.mark.gpu
@every
def test_infinities_and_nan_do_not_come_out_finite(kernel: DenseKernel) -> None:
    pattern, *_ = kernel.patterns
    x, factor = make_input(64, pattern.c, kernel.arithmetic, device="cuda"), make_factor(pattern, kernel.arithmetic, device="cuda")
    x[3, 5], x[9, 200] = torch.inf, torch.nan
    out = kernel.linear(x, factor)
    assert not bool(out[[3, 9]].isfinite().any())
    assert bool(out[[row for row in range(64) if row not in (3, 9)]].isfinite().all())


@pytest.mark.gpu
@of_several
def test_linears_side_by_side_dense_or_not(kernel: DenseKernel) -> None:
    arithmetic = kernel.arithmetic
    x, factors = make_input(197, 384, arithmetic, device="cuda"), make_factors(gonon(384, 384), arithmetic, device="cuda")
    dense, bias = make_factor(SQUARE, arithmetic, device="cuda"), make_vector(384, arithmetic, device="cuda")
    out = kernel.linears(x, [dense[0, :, :, 0], *factors, dense[0, :, :, 0]], [0, 2, 0], [bias, None, None])
    assert_equal(out, torch.cat([kernel.run(x, [dense], bias), kernel.run(x, factors, None), kernel.run(x, [dense], None)], dim=-1))


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", EARLY, ids=str, indirect=True)
def test_a_chain_of_kernels_that_begin_early_sees_each_result(kernel: DenseKernel) -> None:
    """Eager and in a graph, with other operators, a copy and another stream between; and weights that change."""
    dtype, make, side = kernel.arithmetic.dtype, torch.Generator("cuda").manual_seed(7), torch.cuda.Stream()
    weights = [torch.randn(size, generator=make, device="cuda").to(dtype) / 20 for size in ((1536, 384), (384, 1536), (384, 384))]
    norm = Norm(torch.ones(384, device="cuda"), None, 1e-6)
    x = torch.randn(197 if kernel.kind == "few rows" else 394, 384, generator=make, device="cuda").to(dtype)

    def chain(x: Tensor) -> Tensor:
        for _ in range(4):
            x = run(x, FeedForward(norm, Dense(weights[0]), Dense(weights[1])))
            copied = torch.empty_like(x)
            copied.copy_(x)
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                other = run(copied, NormLinears(norm, [Dense(weights[2])]))
            torch.cuda.current_stream().wait_stream(side)
            x = run(other.clone(), LinearResidual(Dense(weights[2]), x))
            x = run(run(x, NormLinears(norm, [Dense(weights[2])])), LinearResidual(Dense(weights[2]), x))
        return x

    def plain(x: Tensor, norm: Norm, up: Dense, down: Dense, square: Dense) -> Tensor:
        for _ in range(4):
            x = FeedForward(norm, up, down).plainly(x)
            for _ in range(2):
                x = LinearResidual(square, x).plainly(NormLinears(norm, [square]).plainly(x))
        return x

    first = chain(x)
    ones = Norm(torch.ones(384, device="cuda", dtype=dtype), None, 1e-6)
    truth = plain(x.double(), Norm(None, None, 1e-6), *(Dense(weight.double()) for weight in weights))
    assert_epilogue_comparable(first, plain(x, ones, *map(Dense, weights)), truth, kernel.arithmetic)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = chain(x)
    for _ in range(3):
        out.zero_()
        graph.replay()
        assert_equal(out, first)
    with torch.no_grad():
        weights[2].neg_()
    graph.replay()
    assert_equal(out, chain(x))


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", [kernel for kernel in KERNELS if kernel.tile is None], ids=str, indirect=True)
def test_the_operator_is_well_behaved(kernel: DenseKernel) -> None:
    arithmetic = kernel.arithmetic
    x, residual = (make_input(70, 384, arithmetic, device="cuda") for _ in range(2))
    weight, bias = make_factor(SQUARE, arithmetic, device="cuda")[0, :, :, 0], make_vector(384, arithmetic, device="cuda")
    if kernel.kind == "few rows":
        few_rows, factors = torch.ops.flysurgery.few_rows.default, make_factors(gonon(384, 384), arithmetic, device="cuda")
        torch.library.opcheck(few_rows, (x, bias, None, 1e-6, [weight], [0], [bias], "gelu", residual, bias))
        torch.library.opcheck(few_rows, (x, None, None, None, factors, [2], [None], "none", None, None))
    elif kernel.kind == "some rows":
        some_rows = torch.ops.flysurgery.some_rows.default
        torch.library.opcheck(some_rows, (x, [weight], [0], [bias], "gelu", residual, bias, kernel.mode))
    else:
        torch.library.opcheck(torch.ops.flysurgery.dense_linear.default, (x, weight, bias, "gelu", residual, bias, kernel.mode))
