"""The dense kernel on the GPU, by all levels of the tolerance policy: a dense matrix is the factor (1, outputs, inputs, 1)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from flysurgery.ops import ks_linear
from flysurgery.ops.cuda import dense
from flysurgery.ops.cuda.dense import run_dense
from flysurgery.ops.cuda.dense_tiling import DenseTiling, dense_tiling
from flysurgery.ops.cuda.kernel import device_arch
from flysurgery.ops.cuda.obstacles import shared_limit_of
from flysurgery.patterns import Architecture, Pattern, gonon
from tests.support.levels import check_bound, check_identity, check_integers, check_layer
from tests.support.oracle import ACTIVATIONS, product
from tests.support.problems import INPUTS, make_factor, make_factors, make_input, make_integers, make_vector
from tests.support.tolerance import (
    MODES,
    assert_epilogue_bounded,
    assert_epilogue_comparable,
    assert_equal,
)

pytestmark = pytest.mark.gpu

SQUARE, WIDE, DEEP = Pattern(1, 384, 384, 1), Pattern(1, 576, 192, 1), Pattern(1, 96, 768, 1)


@pytest.fixture(params=[True, False], ids=["wgmma", "mma.sync"], autouse=True)
def warpgroups(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """By warpgroups where the device has them, and by warps."""
    if request.param and device_arch(0) != "sm_90a":
        pytest.skip("wgmma needs compute capability 9.0")

    def tiling(in_features: int, out_features: int, mode: str, device_index: int, gated: bool) -> DenseTiling | str:
        return dense_tiling(in_features, out_features, mode, shared_limit_of(device_index), request.param, gated)

    monkeypatch.setattr(dense, "_tiling", tiling)
    monkeypatch.setattr(dense, "launcher", dense.launcher.__wrapped__)  # which remembers the tiling
    return request.param


def runner(mode: str) -> Callable[[Tensor, Sequence[Tensor], Tensor | None], Tensor]:
    def run(x: Tensor, factors: Sequence[Tensor], bias: Tensor | None) -> Tensor:
        return run_dense(x, factors[0][0, :, :, 0].contiguous(), bias, "none", None, None, mode)

    return run


def plainly(x: Tensor, factors: Sequence[Tensor], bias: Tensor | None) -> Tensor:
    return ks_linear(x, factors, bias, backend="bmm")


@pytest.mark.parametrize("pattern", [SQUARE, WIDE, DEEP], ids=str)
def test_exact_data(mode: str, pattern: Pattern) -> None:
    check_identity(runner(mode), pattern, MODES[mode], "cuda")
    check_integers(runner(mode), Architecture((pattern,)), 131, MODES[mode], "cuda")


@pytest.mark.parametrize("pattern", [SQUARE, DEEP], ids=str)
@pytest.mark.parametrize("kind", INPUTS)
def test_every_element_is_bounded(mode: str, pattern: Pattern, kind: str) -> None:
    check_bound(runner(mode), kind, pattern, 77, MODES[mode], "cuda")


@pytest.mark.parametrize("pattern", [SQUARE, WIDE, DEEP], ids=str)
@pytest.mark.parametrize("rows", [197, 1009, 25216])
def test_as_accurate_as_pytorch(mode: str, pattern: Pattern, rows: int) -> None:
    check_layer(runner(mode), plainly, Architecture((pattern,)), rows, MODES[mode], "cuda")


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("with_residual", [False, True])
def test_epilogues(mode: str, activation: str, with_residual: bool) -> None:
    arithmetic, compute = MODES[mode], ACTIVATIONS[activation]
    x, factor = make_input(333, 384, arithmetic, device="cuda"), make_factor(SQUARE, arithmetic, device="cuda")
    bias = make_vector(384, arithmetic, device="cuda")
    residual = make_input(333, 384, arithmetic, device="cuda") if with_residual else None
    out = run_dense(x, factor[0, :, :, 0], bias, activation, residual, None, mode)
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
    out = run_dense(x, factor[0, :, :, 0], None, "none", None, scale, mode)
    assert_equal(out, product(x, [factor]) * 2.0**-26)


def test_any_number_of_rows_strided_or_not(mode: str) -> None:
    arithmetic = MODES[mode]
    factor, bias = make_factor(SQUARE, arithmetic, device="cuda"), make_vector(384, arithmetic, device="cuda")
    x, residual = (make_input(1031, 400, arithmetic, device="cuda")[:, :384] for _ in range(2))
    whole = run_dense(x.contiguous(), factor[0, :, :, 0], bias, "none", residual.contiguous(), None, mode)
    for rows in (0, 1, 7, 64, 129, 197, 1031):
        assert_equal(run_dense(x[:rows], factor[0, :, :, 0], bias, "none", residual[:rows], None, mode), whole[:rows])
    assert_equal(run_dense(torch.zeros_like(x[:3]), factor[0, :, :, 0], bias, "none", None, None, mode), bias.expand(3, -1))


def test_infinities_and_nan_do_not_come_out_finite(mode: str) -> None:
    arithmetic = MODES[mode]
    x, factor = make_input(64, 384, arithmetic, device="cuda"), make_factor(SQUARE, arithmetic, device="cuda")
    x[3, 5], x[9, 200] = torch.inf, torch.nan
    out = run_dense(x, factor[0, :, :, 0], None, "none", None, None, mode)
    assert not bool(out[[3, 9]].isfinite().any())
    others = [row for row in range(64) if row not in (3, 9)]
    assert bool(out[others].isfinite().all())


def test_the_operators_are_well_behaved(mode: str) -> None:
    arithmetic = MODES[mode]
    x, residual = (make_input(70, 384, arithmetic, device="cuda") for _ in range(2))
    weight, bias = make_factor(SQUARE, arithmetic, device="cuda")[0, :, :, 0], make_vector(384, arithmetic, device="cuda")
    torch.library.opcheck(torch.ops.flysurgery.dense_linear.default, (x, weight, bias, "gelu", residual, bias, mode))
    factors = make_factors(gonon(384, 384), arithmetic, device="cuda")
    torch.library.opcheck(torch.ops.flysurgery.ks_linear_epilogue.default, (x, factors, bias, "gelu", residual, None, mode))
