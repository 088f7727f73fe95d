"""Products with epilogues, of dense matrices and of two factors, by all levels of the tolerance policy."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from flysurgery.gpu.dense import run_dense, run_dense_moments, streamed_for
from flysurgery.gpu.device import shared_limit_of
from flysurgery.gpu.fused_linear import FusedLinear
from flysurgery.gpu.tiling import Tiling, every_config, tiling
from flysurgery.ops import BACKENDS, Dense, Linear, Norm, NormLinears, ks_linear, run
from flysurgery.ops.multiply import ks_linear_group
from flysurgery.ops.one_launch import few_rows_linear, linear_epilogue, takes_few_rows
from flysurgery.patterns import Architecture, Pattern, gonon, monarch
from tests.support.blocks import comparable, normal
from tests.support.levels import check_bound, check_identity, check_integers, check_layer
from tests.support.oracle import ACTIVATIONS, product
from tests.support.problems import INPUTS, LARGE_ROWS, make_factor, make_factors, make_input, make_integers, make_vector
from tests.support.tolerance import (
    ARITHMETICS,
    FP32_BY_FP16_PAIRS,
    Arithmetic,
    assert_epilogue_bounded,
    assert_epilogue_comparable,
    assert_equal,
)

pytestmark = pytest.mark.gpu

SQUARE = Pattern(1, 384, 384, 1)
SIZES = [SQUARE, *(Pattern(1, *sizes, 1) for sizes in ((96, 768), (1536, 384), (384, 1536), (96, 192), (96, 1536)))]
"""Of dense layers, each the factor (1, outputs, inputs, 1)."""
FEW, SOME, ANY = 77, 1009, 3333
"""Rows that kernels of their own take."""


def launched(x: Tensor, linear: Linear, activation: str = "none", residual: Tensor | None = None, scale: Tensor | None = None) -> Tensor:
    """``residual + activation(scale * linear(x))`` by the kernel for as many rows."""
    if takes_few_rows(x, (linear,)):
        return few_rows_linear(x, None, (linear,), activation, residual, scale)
    return linear_epilogue(x, linear, activation, residual, scale)


def multiplied(x: Tensor, factors: Sequence[Tensor], bias: Tensor | None = None, *epilogue: Any) -> Tensor:
    """By one factor (1, outputs, inputs, 1) as a dense weight."""
    (factor,) = factors
    return launched(x, Dense(factor[0, :, :, 0], bias), *epilogue)


def plainly(x: Tensor, factors: Sequence[Tensor], bias: Tensor | None) -> Tensor:
    return ks_linear(x, factors, bias, backend="bmm")


def check_epilogue(
    out: Tensor, x: Tensor, factors: Sequence[Tensor], bias: Tensor, activation: str, residual: Tensor | None, arithmetic: Arithmetic
) -> None:
    """Levels 1 and 2 for ``activation(product + bias) + residual``."""
    compute = ACTIVATIONS[activation]
    yardstick, truth = compute(plainly(x, factors, bias)), compute(product(x, factors, bias))
    if residual is not None:
        yardstick, truth = yardstick + residual, truth + residual.double()
    assert_epilogue_bounded(out, x, factors, bias, compute, residual, arithmetic)
    assert_epilogue_comparable(out, yardstick, truth, arithmetic)


OF_MODES = [(mode, pattern) for n, pattern in enumerate(SIZES) for m, mode in enumerate(ARITHMETICS) if n < 2 or (n + m) % 2]


@pytest.mark.parametrize(("mode", "pattern"), OF_MODES, ids=str, indirect=["mode"])
def test_dense_layers_by_all_levels(mode: str, pattern: Pattern) -> None:
    arithmetic, architecture = ARITHMETICS[mode], Architecture((pattern,))
    check_identity(multiplied, pattern, arithmetic, "cuda")
    for rows in (FEW, SOME, *((ANY,) if pattern in SIZES[:2] else ())):
        check_integers(multiplied, architecture, rows, arithmetic, "cuda")
        for kind in INPUTS:
            check_bound(multiplied, kind, pattern, rows, arithmetic, "cuda")
    for rows in (197, SOME, *((25217,) if pattern in SIZES[:2] else ())):  # often round the multiprocessors, with one row left
        check_layer(multiplied, plainly, architecture, rows, arithmetic, "cuda")


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_epilogues_of_dense_layers_and_strided_rows(mode: str, activation: str) -> None:
    arithmetic, turn = ARITHMETICS[mode], [*ARITHMETICS].index(mode) + [*ACTIVATIONS].index(activation)
    factor, bias = make_factor(SQUARE, arithmetic, device="cuda"), make_vector(384, arithmetic, device="cuda")
    for n, rows in enumerate((333, 1600, ANY)):
        x, added = (make_input(rows, 400, arithmetic, device="cuda")[:, start : start + 384] for start in (0, 8))
        residual = added if (n + turn) % 2 else None
        out = multiplied(x, [factor], bias, activation, residual)
        check_epilogue(out, x, [factor], bias, activation, residual, arithmetic)
        assert_equal(multiplied(x.contiguous(), [factor], bias, activation, None if residual is None else residual.contiguous()), out)


def test_any_number_of_rows_a_small_scale_and_what_is_not_finite(mode: str) -> None:
    """In float16 a weight times this scale is 0; the results, multiples of 2^-24, are exact."""
    arithmetic, scale = ARITHMETICS[mode], torch.full((384,), 2.0**-26, device="cuda")
    factor = make_integers(SQUARE.factor_shape, seed=2, mode=arithmetic, device="cuda")
    for rows in (0, 1, 7, 64, 129, 231, 431, 1600, ANY):
        x = make_integers((rows, 384), seed=1, mode=arithmetic, device="cuda") * 4
        assert_equal(multiplied(x, [factor], None, "none", None, scale), product(x, [factor]) * 2.0**-26)
        if rows >= 64:
            x[3, 5], x[9, 200] = torch.inf, torch.nan
            for out in (multiplied(x, [factor]), run(x, NormLinears(Norm(None, None, 1e-6), [Dense(factor[0, :, :, 0])]))):
                assert not bool(out[[3, 9]].isfinite().any())
                assert bool(out[[row for row in range(rows) if row not in (3, 9)]].isfinite().all())


STREAMED = [(768, 768, "gelu", False), (768, 1152, "none", True), (1024, 1024, "silu", True)]


@pytest.mark.parametrize("mode", ["fp16", "bf16"])
@pytest.mark.parametrize(("in_features", "out_features", "activation", "with_residual"), STREAMED)
def test_streamed_weights(mode: str, in_features: int, out_features: int, activation: str, with_residual: bool) -> None:
    """Also the moments of the result, of rows whose mean is far larger than their deviations, and of rows with one element that is."""
    rows, dtype = 8451, ARITHMETICS[mode].dtype
    assert streamed_for(rows, in_features, out_features, mode, 0) is not None
    torch.manual_seed(5)
    x = normal(rows, in_features + 64, dtype=dtype)[:, :in_features]
    weight, bias = normal(out_features, in_features, dtype=dtype, deviation=in_features**-0.5), normal(out_features, dtype=dtype)
    scale, added = normal(out_features, dtype=dtype), normal(rows, out_features + 8, dtype=dtype)[:, :out_features]
    residual = added if with_residual else None
    out = run_dense(x, Dense(weight, bias), activation, residual, scale, mode)

    def plain(dtype: torch.dtype) -> Tensor:
        y = ACTIVATIONS[activation](scale.to(dtype) * torch.nn.functional.linear(x.to(dtype), weight.to(dtype), bias.to(dtype)))
        return y if residual is None else y + residual.to(dtype)

    comparable(out, plain(dtype), plain(torch.float64), ARITHMETICS[mode].k)
    added = added.contiguous()
    added[::3] += 100
    added[1::3, 0] += 100
    y, moments = run_dense_moments(x, Dense(weight), added, None, mode)
    assert_equal(y, run_dense(x, Dense(weight), "none", added, None, mode))
    parts = y.double().unflatten(1, (moments.shape[1], -1))
    squares = (parts - parts.mean(dim=2, keepdim=True)).square().sum(dim=2)
    assert float((moments[..., 0] - parts.mean(dim=2)).abs().max()) < 1e-4
    assert float((moments[..., 1] / squares - 1).abs().max()) < 1e-3


FUSED_LAYERS = (
    Architecture.of((1, 192, 48, 2), (2, 48, 192, 1)),
    Architecture.of((1, 48, 48, 3), (6, 24, 32, 1)),  # not chainable: classes of uneven size share tiles
    Architecture.of((1, 24, 24, 4), (4, 24, 96, 1)),
)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_epilogues_of_fused_linears(mode: str, activation: str) -> None:
    """Each place of the intermediate, each layer and a residual by turns.

    Far below zero an activation is -0 or tiny, never NaN, and far above it is the identity.
    """
    arithmetic, of_mode, turn = ARITHMETICS[mode], [*ARITHMETICS].index(mode), [*ACTIVATIONS].index(activation)
    architecture = FUSED_LAYERS[(of_mode + turn) % len(FUSED_LAYERS)]
    x, added = (make_input(333, features, arithmetic, device="cuda") for features in (architecture.in_features, architecture.out_features))
    left, right = make_factors(architecture, arithmetic, device="cuda")
    bias, tile = make_vector(architecture.out_features, arithmetic, device="cuda"), tiling(architecture, mode)
    assert isinstance(tile, Tiling), tile
    every = sorted(every_config(tile, shared_limit_of(0)), key=lambda config: (config.panel_columns, config.slots, config.warps))
    places = [*{config.u_shared: config for config in every}.values()]
    layer, residual = FusedLinear(tile, places[turn % len(places)], 0), added if (of_mode + turn // 2) % 2 else None
    out = layer.run(x, layer.pack([(left, right)]), bias, residual, activation)
    check_epilogue(out, x, (left, right), bias, activation, residual, arithmetic)
    nothing = torch.zeros_like(left), torch.zeros_like(right)
    for value in (-1000.0, -30.0, 30.0, 1000.0):
        far = torch.full_like(bias, value)
        out = layer.run(x, layer.pack([nothing]), far, None, activation)
        assert_epilogue_bounded(out, x, nothing, far, ACTIVATIONS[activation], None, arithmetic)


def ranged(x: Tensor) -> Tensor:
    """Rows of 2^-20 to 2^12."""
    return x * torch.exp2(torch.arange(len(x), device=x.device) % 33 - 20.0)[:, None]


def spiked(x: Tensor) -> Tensor:
    """An element of 1e30 in every row, early or late in it."""
    rows = torch.arange(len(x), device=x.device)
    x[rows, rows * 7 % x.shape[1]] = 1e30
    return x


@pytest.mark.parametrize(("architecture", "linears"), [(gonon(384, 384), 3), (gonon(384, 1536), 1), (monarch(1536, 384), 1)], ids=str)
@pytest.mark.parametrize("kind", [torch.clone, ranged, spiked])
def test_the_error_of_float32_is_at_most_twice_that_of_torch(
    architecture: Architecture, linears: int, kind: Callable[[Tensor], Tensor]
) -> None:
    mode = FP32_BY_FP16_PAIRS
    factors = [
        [make_factor(pattern, mode, device="cuda", seed=2 * linear + side) for side, pattern in enumerate(architecture)]
        for linear in range(linears)
    ]
    x = kind(make_input(LARGE_ROWS[0], architecture.in_features, mode, device="cuda"))
    truth = torch.cat([product(x, own, None) for own in factors], dim=-1)

    def error(y: Tensor) -> float:
        """Relative to each row, over all rows."""
        return float(((y.double() - truth) / truth.norm(dim=1, keepdim=True)).norm())

    ours = error(ks_linear_group(x, factors, [None] * linears, backend="cuda"))
    torchs = error(torch.cat([BACKENDS["bmm"].bind(tuple(own), None)(x) for own in factors], dim=-1))
    assert ours <= 2 * torchs, f"{ours / torchs:.2f} times the error of float32 products"
