"""The kernel for few rows on the GPU, by all levels of the tolerance policy: a dense matrix is the factor (1, outputs, inputs, 1)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn.functional import gelu, layer_norm, silu

from flysurgery.factors import factors_to_dense
from flysurgery.ops import Dense, Norm, composed, ffn, ks_linear, linear_residual, norm_linear
from flysurgery.ops.cuda.few_rows import run_few_rows
from flysurgery.patterns import Architecture, Pattern, gonon, monarch
from tests.support.levels import check_bound, check_identity, check_integers, check_layer
from tests.support.oracle import product
from tests.support.problems import INPUTS, make_factor, make_factors, make_input, make_integers, make_vector
from tests.support.tolerance import BF16, FP16, Arithmetic, assert_epilogue_bounded, assert_epilogue_comparable, assert_equal

pytestmark = pytest.mark.gpu

SQUARE, UP, DOWN, BASE = Pattern(1, 384, 384, 1), Pattern(1, 1536, 384, 1), Pattern(1, 384, 1536, 1), Pattern(1, 768, 768, 1)
NARROW = Pattern(1, 96, 192, 1)
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda v: v,
    "gelu": gelu,
    "gelu_tanh": lambda v: gelu(v, approximate="tanh"),
    "silu": silu,
}


@pytest.fixture(params=[FP16, BF16], ids=["fp16", "bf16"])
def mode(request: pytest.FixtureRequest) -> Arithmetic:
    return request.param


def run(x: Tensor, factors: Sequence[Tensor], bias: Tensor | None) -> Tensor:
    """By one factor as a dense weight, by several as factors, and so many rows at a time as all layers here are taken with."""
    dense = len(factors) == 1
    weights, lengths = ([factors[0][0, :, :, 0].contiguous()], [0]) if dense else (list(factors), [len(factors)])
    return torch.cat([run_few_rows(rows, None, None, None, weights, lengths, [bias], "none", None, None) for rows in x.split(197)])


def plainly(x: Tensor, factors: Sequence[Tensor], bias: Tensor | None) -> Tensor:
    return ks_linear(x, factors, bias, backend="bmm")


@pytest.mark.parametrize("pattern", [SQUARE, UP, DOWN, NARROW], ids=str)
def test_exact_data(mode: Arithmetic, pattern: Pattern) -> None:
    check_identity(run, pattern, mode, "cuda")
    check_integers(run, Architecture((pattern,)), 131, mode, "cuda")


@pytest.mark.parametrize("pattern", [SQUARE, UP, DOWN], ids=str)
@pytest.mark.parametrize("kind", INPUTS)
def test_every_element_is_bounded(mode: Arithmetic, pattern: Pattern, kind: str) -> None:
    check_bound(run, kind, pattern, 77, mode, "cuda")


@pytest.mark.parametrize("pattern", [SQUARE, UP, DOWN, BASE, NARROW], ids=str)
@pytest.mark.parametrize("rows", [65, 197])
def test_as_accurate_as_pytorch(mode: Arithmetic, pattern: Pattern, rows: int) -> None:
    check_layer(run, plainly, Architecture((pattern,)), rows, mode, "cuda")


@pytest.mark.parametrize("architecture", [gonon(384, 384), monarch(1536, 384)], ids=str)
def test_factors_are_multiplied_out_and_rounded_once(mode: Arithmetic, architecture: Architecture) -> None:
    check_integers(run, architecture, 0, mode, "cuda")
    factors, bias = make_factors(architecture, mode, device="cuda"), make_vector(architecture.out_features, mode, device="cuda")
    x = make_input(150, architecture.in_features, mode, device="cuda")
    weight = factors_to_dense([factor.double() for factor in factors]).to(mode.dtype)
    assert_equal(run(x, factors, bias), run(x, [weight[None, :, :, None]], bias))


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("with_residual", [False, True])
def test_epilogues(mode: Arithmetic, activation: str, with_residual: bool) -> None:
    compute = ACTIVATIONS[activation]
    x, factor = make_input(133, 384, mode, device="cuda"), make_factor(SQUARE, mode, device="cuda")
    bias = make_vector(384, mode, device="cuda")
    residual = make_input(133, 384, mode, device="cuda") if with_residual else None
    out = run_few_rows(x, None, None, None, [factor[0, :, :, 0]], [0], [bias], activation, residual, None)
    yardstick, truth = compute(plainly(x, [factor], bias)), compute(product(x, [factor], bias))
    if residual is not None:
        yardstick, truth = yardstick + residual, truth + residual.double()
    assert_epilogue_bounded(out, x, [factor], bias, compute, residual, mode)
    assert_epilogue_comparable(out, yardstick, truth, mode)


@pytest.mark.parametrize(("mean", "deviation"), [(0.0, 1.0), (50.0, 1.0), (0.5, 2e-3)])
@pytest.mark.parametrize("pattern", [SQUARE, UP, BASE], ids=str)
def test_a_norm_before(mode: Arithmetic, pattern: Pattern, mean: float, deviation: float) -> None:
    x = (torch.randn(197, pattern.c, generator=torch.Generator("cuda").manual_seed(1), device="cuda") * deviation + mean).to(mode.dtype)
    weight, bias = make_vector(pattern.c, mode, device="cuda"), make_vector(pattern.c, mode, device="cuda")
    factor = make_factor(pattern, mode, device="cuda")
    out = run_few_rows(x, weight, bias, 1e-6, [factor[0, :, :, 0]], [0], [None], "none", None, None)
    truth = product(layer_norm(x.double(), (pattern.c,), weight.double(), bias.double(), 1e-6), [factor])
    yardstick = plainly(layer_norm(x, (pattern.c,), weight, bias, 1e-6), [factor], None)
    assert_epilogue_comparable(out, yardstick, truth, mode)


def test_a_small_layer_scale_does_not_vanish(mode: Arithmetic) -> None:
    """Of integers: in float16 a weight times this scale is 0, and the results, multiples of 2^-24, are exact."""
    x = make_integers((200, 384), seed=1, mode=mode, device="cuda") * 4
    factor = make_integers(SQUARE.factor_shape, seed=2, mode=mode, device="cuda")
    scale = torch.full((384,), 2.0**-26, device="cuda")
    out = run_few_rows(x, None, None, None, [factor[0, :, :, 0]], [0], [None], "none", None, scale)
    assert_equal(out, product(x, [factor]) * 2.0**-26)


def test_any_number_of_rows_strided_or_not(mode: Arithmetic) -> None:
    factor, bias = make_factor(SQUARE, mode, device="cuda")[0, :, :, 0], make_vector(384, mode, device="cuda")
    x, residual = (make_input(231, 400, mode, device="cuda")[:, :384] for _ in range(2))

    def of(rows: Tensor, added: Tensor) -> Tensor:
        return run_few_rows(rows, None, None, None, [factor], [0], [bias], "none", added, None)

    whole = of(x.contiguous(), residual.contiguous())
    for rows in (0, 1, 7, 64, 129, 231):
        assert_equal(of(x[:rows], residual[:rows]), whole[:rows])


def test_infinities_and_nan_do_not_come_out_finite(mode: Arithmetic) -> None:
    x, factor = make_input(64, 384, mode, device="cuda"), make_factor(SQUARE, mode, device="cuda")
    x[3, 5], x[9, 200] = torch.inf, torch.nan
    others = [row for row in range(64) if row not in (3, 9)]
    for eps in (None, 1e-6):
        out = run_few_rows(x, None, None, eps, [factor[0, :, :, 0]], [0], [None], "none", None, None)
        assert not bool(out[[3, 9]].isfinite().any())
        assert bool(out[others].isfinite().all())


def test_linears_side_by_side_dense_or_not(mode: Arithmetic) -> None:
    x, factors = make_input(197, 384, mode, device="cuda"), make_factors(gonon(384, 384), mode, device="cuda")
    dense, bias = make_factor(SQUARE, mode, device="cuda")[0, :, :, 0], make_vector(384, mode, device="cuda")
    out = run_few_rows(x, None, None, None, [dense, *factors, dense], [0, 2, 0], [bias, None, None], "none", None, None)
    alone = [run(x, [dense[None, :, :, None]], bias), run(x, factors, None), run(x, [dense[None, :, :, None]], None)]
    assert_equal(out, torch.cat(alone, dim=-1))


def test_a_chain_of_kernels_that_begin_early_sees_each_result(mode: Arithmetic) -> None:
    """Eager and in a graph, with other operators, a copy and another stream between; and weights that change."""
    make = torch.Generator("cuda").manual_seed(7)
    weights = [torch.randn(size, generator=make, device="cuda").to(mode.dtype) / 20 for size in ((1536, 384), (384, 1536), (384, 384))]
    norm, side = Norm(torch.ones(384, device="cuda"), None, 1e-6), torch.cuda.Stream()
    x = torch.randn(197, 384, generator=make, device="cuda").to(mode.dtype)

    def chain(x: Tensor) -> Tensor:
        for _ in range(4):
            x = ffn(x, norm, Dense(weights[0]), Dense(weights[1]))
            copied = torch.empty_like(x)
            copied.copy_(x)
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                other = norm_linear(copied, norm, [Dense(weights[2])])
            torch.cuda.current_stream().wait_stream(side)
            x = linear_residual(other.clone(), Dense(weights[2]), x)
        return x

    def plain(x: Tensor, norm: Norm, up: Dense, down: Dense, square: Dense) -> Tensor:
        for _ in range(4):
            x = composed.ffn(x, norm, up, down)
            x = composed.linear_residual(composed.norm_linear(x, norm, [square]), square, x)
        return x

    first = chain(x)
    halves = Norm(torch.ones(384, device="cuda", dtype=mode.dtype), None, 1e-6)
    truth = plain(x.double(), Norm(None, None, 1e-6), *(Dense(weight.double()) for weight in weights))
    assert_epilogue_comparable(first, plain(x, halves, *map(Dense, weights)), truth, mode)
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


def test_the_operator_is_well_behaved(mode: Arithmetic) -> None:
    x, residual = (make_input(70, 384, mode, device="cuda") for _ in range(2))
    weight, bias = make_factor(SQUARE, mode, device="cuda")[0, :, :, 0], make_vector(384, mode, device="cuda")
    arguments = (x, bias, None, 1e-6, [weight], [0], [bias], "gelu", residual, bias)
    torch.library.opcheck(torch.ops.flysurgery.few_rows.default, arguments)
    factors = make_factors(gonon(384, 384), mode, device="cuda")
    torch.library.opcheck(torch.ops.flysurgery.few_rows.default, (x, None, None, None, [*factors], [2], [None], "none", None, None))


def test_compiled_for_any_number_of_rows(mode: Arithmetic) -> None:
    """Few and many, which take different kernels."""
    x, norm = make_input(394, 384, mode, device="cuda"), Norm(None, None, 1e-6)
    matrices = (make_factor(pattern, mode, device="cuda")[0, :, :, 0].contiguous() for pattern in (UP, DOWN))
    up, down = (Dense(Parameter(matrix, requires_grad=False)) for matrix in matrices)  # parameters' sizes count as constants
    compiled = torch.compile(lambda x: ffn(x, norm, up, down, "gelu"), fullgraph=True, dynamic=True)
    for rows in (197, 394, 100):
        assert_equal(compiled(x[:rows]), ffn(x[:rows], norm, up, down, "gelu"))
