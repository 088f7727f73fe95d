"""The kernel for some hundred rows, by all levels of the tolerance policy: a dense matrix is the factor (1, outputs, inputs, 1)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from flysurgery.factors import factors_to_dense
from flysurgery.ops import Dense, FusedFactors, Norm, composed, ffn, ffn_launches, ks_linear, linear_residual, norm_linear
from flysurgery.ops.cuda import some_rows
from flysurgery.ops.cuda.kernel import device_arch
from flysurgery.ops.cuda.obstacles import shared_limit_of
from flysurgery.ops.cuda.some_rows import run_some_rows
from flysurgery.ops.cuda.some_rows_tiling import SomeRowsTiling, some_rows_tiling, some_rows_tilings
from flysurgery.patterns import Architecture, Pattern, gonon
from tests.support.levels import check_bound, check_identity, check_integers, check_layer
from tests.support.oracle import ACTIVATIONS, product
from tests.support.problems import INPUTS, make_factor, make_factors, make_input, make_integers, make_vector
from tests.support.tolerance import MODES, assert_epilogue_bounded, assert_epilogue_comparable, assert_equal

pytestmark = pytest.mark.gpu

SQUARE, DEEP = Pattern(1, 384, 384, 1), Pattern(1, 96, 1536, 1)


@pytest.fixture(params=[(64, 48, 1, 1), (128, 96, 2, 2), (64, 32, 3, 2), (64, 48, 1, 4)], ids=str, autouse=True)
def tile(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int, int, int]:
    """Rows and columns of a block, groups of warpgroups, and blocks that share the inputs."""
    if device_arch(0) != "sm_90a":
        pytest.skip("wgmma needs compute capability 9.0")

    def tiling(rows: int, in_features: int, out_features: int, mode: str, device_index: int) -> SomeRowsTiling:
        tilings = some_rows_tilings(in_features, out_features, mode, shared_limit_of(device_index))
        same = (each for each in tilings if (each.rows, each.columns, each.split, each.shares) == request.param)
        return next(same, None) or some_rows_tiling(rows, in_features, out_features, mode, 132, shared_limit_of(device_index))

    monkeypatch.setattr(some_rows, "_tiling", tiling)
    return request.param


def runner(mode: str) -> Callable[[Tensor, Sequence[Tensor], Tensor | None], Tensor]:
    """By one factor as a dense weight, by several as factors."""

    def run(x: Tensor, factors: Sequence[Tensor], bias: Tensor | None) -> Tensor:
        dense = len(factors) == 1
        weights, lengths = ([factors[0][0, :, :, 0].contiguous()], [0]) if dense else (list(factors), [len(factors)])
        return run_some_rows(x, weights, lengths, [bias], "none", None, None, mode)

    return run


def plainly(x: Tensor, factors: Sequence[Tensor], bias: Tensor | None) -> Tensor:
    return ks_linear(x, factors, bias, backend="bmm")


@pytest.mark.parametrize("pattern", [SQUARE, DEEP], ids=str)
def test_exact_data(mode: str, pattern: Pattern) -> None:
    check_identity(runner(mode), pattern, MODES[mode], "cuda")
    check_integers(runner(mode), Architecture((pattern,)), 131, MODES[mode], "cuda")


@pytest.mark.parametrize("pattern", [SQUARE, DEEP], ids=str)
@pytest.mark.parametrize("kind", INPUTS)
def test_every_element_is_bounded(mode: str, pattern: Pattern, kind: str) -> None:
    check_bound(runner(mode), kind, pattern, 77, MODES[mode], "cuda")


@pytest.mark.parametrize("pattern", [SQUARE, DEEP], ids=str)
@pytest.mark.parametrize("rows", [197, 1009])
def test_as_accurate_as_pytorch(mode: str, pattern: Pattern, rows: int) -> None:
    check_layer(runner(mode), plainly, Architecture((pattern,)), rows, MODES[mode], "cuda")


def test_factors_are_multiplied_out_and_rounded_once(mode: str) -> None:
    arithmetic, architecture = MODES[mode], gonon(384, 384)
    check_integers(runner(mode), architecture, 0, arithmetic, "cuda")
    factors, bias = make_factors(architecture, arithmetic, device="cuda"), make_vector(384, arithmetic, device="cuda")
    x = make_input(150, 384, arithmetic, device="cuda")
    weight = factors_to_dense([factor.double() for factor in factors]).to(arithmetic.dtype)
    assert_equal(runner(mode)(x, factors, bias), runner(mode)(x, [weight[None, :, :, None]], bias))


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("with_residual", [False, True])
def test_epilogues(mode: str, activation: str, with_residual: bool) -> None:
    arithmetic, compute = MODES[mode], ACTIVATIONS[activation]
    x, factor = make_input(333, 384, arithmetic, device="cuda"), make_factor(SQUARE, arithmetic, device="cuda")
    bias = make_vector(384, arithmetic, device="cuda")
    residual = make_input(333, 384, arithmetic, device="cuda") if with_residual else None
    out = run_some_rows(x, [factor[0, :, :, 0]], [0], [bias], activation, residual, None, mode)
    yardstick, truth = compute(plainly(x, [factor], bias)), compute(product(x, [factor], bias))
    if residual is not None:
        yardstick, truth = yardstick + residual, truth + residual.double()
    assert_epilogue_bounded(out, x, [factor], bias, compute, residual, arithmetic)
    assert_epilogue_comparable(out, yardstick, truth, arithmetic)


def test_a_small_layer_scale_does_not_vanish(mode: str) -> None:
    """Of integers: in float16 a weight times this scale is 0, and the results, multiples of 2^-24, are exact."""
    arithmetic = MODES[mode]
    x = make_integers((200, 384), seed=1, mode=arithmetic, device="cuda") * 4
    factor = make_integers(SQUARE.factor_shape, seed=2, mode=arithmetic, device="cuda")
    scale = torch.full((384,), 2.0**-26, device="cuda")
    out = run_some_rows(x, [factor[0, :, :, 0]], [0], [None], "none", None, scale, mode)
    assert_equal(out, product(x, [factor]) * 2.0**-26)


def test_any_number_of_rows_strided_or_not(mode: str) -> None:
    arithmetic = MODES[mode]
    factor, bias = make_factor(SQUARE, arithmetic, device="cuda")[0, :, :, 0], make_vector(384, arithmetic, device="cuda")
    x, residual = (make_input(431, 400, arithmetic, device="cuda")[:, :384] for _ in range(2))

    def of(rows: Tensor, added: Tensor) -> Tensor:
        return run_some_rows(rows, [factor], [0], [bias], "none", added, None, mode)

    whole = of(x.contiguous(), residual.contiguous())
    for rows in (0, 1, 7, 64, 129, 197, 431):
        assert_equal(of(x[:rows], residual[:rows]), whole[:rows])


def test_infinities_and_nan_do_not_come_out_finite(mode: str) -> None:
    arithmetic = MODES[mode]
    x, factor = make_input(64, 384, arithmetic, device="cuda"), make_factor(SQUARE, arithmetic, device="cuda")
    x[3, 5], x[9, 200] = torch.inf, torch.nan
    out = run_some_rows(x, [factor[0, :, :, 0]], [0], [None], "none", None, None, mode)
    assert not bool(out[[3, 9]].isfinite().any())
    assert bool(out[[row for row in range(64) if row not in (3, 9)]].isfinite().all())


def test_linears_side_by_side_dense_or_not(mode: str) -> None:
    arithmetic = MODES[mode]
    x, factors = make_input(197, 384, arithmetic, device="cuda"), make_factors(gonon(384, 384), arithmetic, device="cuda")
    dense, bias = make_factor(SQUARE, arithmetic, device="cuda")[0, :, :, 0], make_vector(384, arithmetic, device="cuda")
    out = run_some_rows(x, [dense, *factors, dense], [0, 2, 0], [bias, None, None], "none", None, None, mode)
    run = runner(mode)
    alone = [run(x, [dense[None, :, :, None]], bias), run(x, factors, None), run(x, [dense[None, :, :, None]], None)]
    assert_equal(out, torch.cat(alone, dim=-1))


def test_a_chain_of_kernels_that_begin_early_sees_each_result(mode: str) -> None:
    """Eager and in a graph, and weights that change."""
    dtype, make = MODES[mode].dtype, torch.Generator("cuda").manual_seed(7)
    weights = [torch.randn(size, generator=make, device="cuda").to(dtype) / 20 for size in ((1536, 384), (384, 1536), (384, 384))]
    norm, x = Norm(torch.ones(384, device="cuda"), None, 1e-6), torch.randn(394, 384, generator=make, device="cuda").to(dtype)

    def chain(x: Tensor) -> Tensor:
        for _ in range(4):
            x = ffn(x, norm, Dense(weights[0]), Dense(weights[1]))
            x = linear_residual(norm_linear(x, norm, [Dense(weights[2])]), Dense(weights[2]), x)
        return x

    def plain(x: Tensor, norm: Norm, up: Dense, down: Dense, square: Dense) -> Tensor:
        for _ in range(4):
            x = composed.ffn(x, norm, up, down)
            x = composed.linear_residual(composed.norm_linear(x, norm, [square]), square, x)
        return x

    first = chain(x)
    ones = Norm(torch.ones(384, device="cuda", dtype=dtype), None, 1e-6)
    truth = plain(x.double(), Norm(None, None, 1e-6), *(Dense(weight.double()) for weight in weights))
    assert_epilogue_comparable(first, plain(x, ones, *map(Dense, weights)), truth, MODES[mode])
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


def test_the_operator_is_well_behaved(mode: str) -> None:
    arithmetic = MODES[mode]
    x, residual = (make_input(70, 384, arithmetic, device="cuda") for _ in range(2))
    weight, bias = make_factor(SQUARE, arithmetic, device="cuda")[0, :, :, 0], make_vector(384, arithmetic, device="cuda")
    torch.library.opcheck(torch.ops.flysurgery.some_rows.default, (x, [weight], [0], [bias], "gelu", residual, bias, mode))


def test_a_feed_forward_block_of_factors(mode: str) -> None:
    """Of two images: its norm has a launch of its own, and so has each layer."""
    arithmetic = MODES[mode]
    x, norm = make_input(394, 384, arithmetic, device="cuda"), Norm(torch.ones(384, device="cuda"), None, 1e-6)
    up, down = (FusedFactors(tuple(make_factors(gonon(*sizes), arithmetic, device="cuda"))) for sizes in ((1536, 384), (384, 1536)))
    assert ffn_launches(x, norm, up, down) == ("norm", "up and activation", "down and residual")
    exact_up, exact_down = (FusedFactors(tuple(factor.double() for factor in linear.factors)) for linear in (up, down))
    truth = composed.ffn(x.double(), Norm(None, None, 1e-6), exact_up, exact_down)
    yardstick = composed.ffn(x, Norm(None, None, 1e-6), up, down)
    assert_epilogue_comparable(ffn(x, norm, up, down), yardstick, truth, arithmetic)
