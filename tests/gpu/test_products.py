"""Each kernel that multiplies by a dense matrix or by two factors, by all levels of the tolerance policy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from flysurgery.factors import factors_to_dense
from flysurgery.gpu.dense import run_dense, run_dense_moments, streamed_for
from flysurgery.gpu.device import shared_limit_of
from flysurgery.gpu.few_rows import run_few_rows
from flysurgery.gpu.fused import FusedLinear
from flysurgery.gpu.fused_configs import every_config
from flysurgery.gpu.some_rows import run_some_rows
from flysurgery.gpu.tiling import FusedConfig, Tiling, tiling
from flysurgery.ops import BACKENDS, Dense, FeedForward, FusedFactors, LinearResidual, Norm, NormLinears, ks_linear, run
from flysurgery.ops.multiply import ks_linear_group
from flysurgery.patterns import Architecture, Pattern, gonon, monarch
from tests.gpu.gpu_blocks import check_replay, comparable, normal
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
FEW_ROWS = 256  # as many as the kernel for few rows takes at a time, of every layer here


@dataclass(frozen=True)
class DenseKernel:
    """A kernel in one mode.

    Attributes:
        kind: the kernel for ``"any rows"``, ``"few rows"`` or ``"some rows"``.
        patterns: layers to try it on, each the factor (1, outputs, inputs, 1).
        rows: numbers of rows that differ in how they are divided among blocks.
    """

    kind: str
    mode: str
    patterns: tuple[Pattern, ...]
    rows: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.kind}-{self.mode}"

    @property
    def arithmetic(self) -> Arithmetic:
        return ARITHMETICS[self.mode]

    def linears(
        self,
        x: Tensor,
        weights: Sequence[Tensor | Sequence[Tensor]],
        biases: Sequence[Tensor | None],
        activation: str = "none",
        residual: Tensor | None = None,
        scale: Tensor | None = None,
    ) -> Tensor:
        """What ``run_some_rows`` says; the kernel for any number of rows takes one dense layer, that for few rows few at a time."""
        group = [Dense(w, b) if isinstance(w, Tensor) else FusedFactors(tuple(w), b) for w, b in zip(weights, biases, strict=True)]
        if self.kind == "some rows":
            return run_some_rows(x, group, activation, residual, scale, self.mode)
        if self.kind == "few rows":
            parts = x.split(FEW_ROWS)
            added = [None] * len(parts) if residual is None else residual.split(FEW_ROWS)
            pairs = zip(parts, added, strict=True)
            return torch.cat([run_few_rows(part, None, group, activation, each, scale) for part, each in pairs])
        (linear,) = group
        assert isinstance(linear, Dense)
        return run_dense(x, linear, activation, residual, scale, self.mode)

    def linear(self, x: Tensor, factor: Tensor, bias: Tensor | None = None, *epilogue: Any, **more: Any) -> Tensor:
        """One dense layer, given as the factor (1, out_features, in_features, 1)."""
        return self.linears(x, [factor[0, :, :, 0]], [bias], *epilogue, **more)

    def run(self, x: Tensor, factors: Sequence[Tensor], bias: Tensor | None) -> Tensor:
        """By one factor as a dense weight, by several as factors."""
        return self.linear(x, factors[0], bias) if len(factors) == 1 else self.linears(x, [factors], [bias])


SIZES = (SQUARE, Pattern(1, 1536, 384, 1), Pattern(1, 384, 1536, 1))
# any number of rows: once round the multiprocessors, and often, with one row in the last tile
KERNELS = [DenseKernel("any rows", mode, (SQUARE, Pattern(1, 96, 768, 1)), (197, 25217)) for mode in ARITHMETICS]
KERNELS += [DenseKernel("few rows", mode, (*SIZES, Pattern(1, 96, 192, 1)), (65, 197)) for mode in ("fp16", "bf16")]
# some rows: of these sizes some are divided among blocks that share the inputs, and some are not
KERNELS += [DenseKernel("some rows", mode, (*SIZES, Pattern(1, 96, 1536, 1)), (197, 1009)) for mode in ARITHMETICS]
OF_SEVERAL = [kernel for kernel in KERNELS if kernel.kind != "any rows"]
"""Those that take several linears, and factors, which they multiply out; they begin while the one before still runs."""

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


@each_pattern()
def test_exact_data(kernel: DenseKernel, pattern: Pattern) -> None:
    check_identity(kernel.run, pattern, kernel.arithmetic, "cuda")
    check_integers(kernel.run, Architecture((pattern,)), 131, kernel.arithmetic, "cuda")


@pytest.mark.parametrize("kind", INPUTS)
@every
def test_every_element_is_bounded(kernel: DenseKernel, kind: str) -> None:
    longest = max(kernel.patterns, key=lambda pattern: pattern.c)
    check_bound(kernel.run, kind, longest, 77, kernel.arithmetic, "cuda")


@each_pattern("rows")
def test_as_accurate_as_pytorch(kernel: DenseKernel, pattern: Pattern, rows: int) -> None:
    check_layer(kernel.run, plainly, Architecture((pattern,)), rows, kernel.arithmetic, "cuda")


@pytest.mark.parametrize("architecture", [gonon(384, 384), monarch(1536, 384)], ids=str)
@of_several
def test_factors_are_multiplied_out_and_rounded_once(kernel: DenseKernel, architecture: Architecture) -> None:
    arithmetic = kernel.arithmetic
    check_integers(kernel.run, architecture, 0, arithmetic, "cuda")
    factors, bias = make_factors(architecture, arithmetic, device="cuda"), make_vector(architecture.out_features, arithmetic, device="cuda")
    x = make_input(150, architecture.in_features, arithmetic, device="cuda")
    weight = factors_to_dense([factor.double() for factor in factors]).to(arithmetic.dtype)
    assert_equal(kernel.run(x, factors, bias), kernel.run(x, [weight[None, :, :, None]], bias))


@pytest.mark.parametrize(
    ("kernel", "activation", "with_residual"),
    [(kernel, name, (place + n) % 2 == 1) for place, kernel in enumerate(KERNELS) for n, name in enumerate(ACTIVATIONS)],
    ids=str,
    indirect=["kernel"],
)
def test_epilogues(kernel: DenseKernel, activation: str, with_residual: bool) -> None:
    """Each activation has a residual in every other mode of a kernel."""
    arithmetic, (pattern, *_) = kernel.arithmetic, kernel.patterns
    x, factor = make_input(333, pattern.c, arithmetic, device="cuda"), make_factor(pattern, arithmetic, device="cuda")
    bias = make_vector(pattern.b, arithmetic, device="cuda")
    residual = make_input(333, pattern.b, arithmetic, device="cuda") if with_residual else None
    check_epilogue(kernel.linear(x, factor, bias, activation, residual), x, [factor], bias, activation, residual, arithmetic)


@every
def test_a_small_layer_scale_does_not_vanish(kernel: DenseKernel) -> None:
    """Of integers: in float16 a weight times this scale is 0, and the results, multiples of 2^-24, are exact."""
    pattern, *_ = kernel.patterns
    x = make_integers((200, pattern.c), seed=1, mode=kernel.arithmetic, device="cuda") * 4
    factor = make_integers(pattern.factor_shape, seed=2, mode=kernel.arithmetic, device="cuda")
    scale = torch.full((pattern.b,), 2.0**-26, device="cuda")
    assert_equal(kernel.linear(x, factor, scale=scale), product(x, [factor]) * 2.0**-26)


@every
def test_any_number_of_rows_strided_or_not(kernel: DenseKernel) -> None:
    arithmetic, (pattern, *_) = kernel.arithmetic, kernel.patterns
    factor, bias = make_factor(pattern, arithmetic, device="cuda"), make_vector(pattern.b, arithmetic, device="cuda")
    x, residual = (make_input(431, size + 16, arithmetic, device="cuda")[:, :size] for size in (pattern.c, pattern.b))
    whole = kernel.linear(x.contiguous(), factor, bias, residual=residual.contiguous())
    for rows in (0, 1, 7, 64, 129, 197, 231, 431):
        assert_equal(kernel.linear(x[:rows], factor, bias, residual=residual[:rows]), whole[:rows])


@every
def test_infinities_and_nan_do_not_come_out_finite(kernel: DenseKernel) -> None:
    pattern, *_ = kernel.patterns
    x, factor = make_input(64, pattern.c, kernel.arithmetic, device="cuda"), make_factor(pattern, kernel.arithmetic, device="cuda")
    x[3, 5], x[9, 200] = torch.inf, torch.nan
    outs = [kernel.linear(x, factor)]
    if kernel.kind == "few rows":
        outs.append(run_few_rows(x, Norm(None, None, 1e-6), [Dense(factor[0, :, :, 0])], "none", None, None))
    for out in outs:
        assert not bool(out[[3, 9]].isfinite().any())
        assert bool(out[[row for row in range(64) if row not in (3, 9)]].isfinite().all())


@of_several
def test_linears_side_by_side_dense_or_not(kernel: DenseKernel) -> None:
    arithmetic = kernel.arithmetic
    x, factors = make_input(197, 384, arithmetic, device="cuda"), make_factors(gonon(384, 384), arithmetic, device="cuda")
    dense, bias = make_factor(SQUARE, arithmetic, device="cuda"), make_vector(384, arithmetic, device="cuda")
    out = kernel.linears(x, [dense[0, :, :, 0], factors, dense[0, :, :, 0]], [bias, None, None])
    assert_equal(out, torch.cat([kernel.run(x, [dense], bias), kernel.run(x, factors, None), kernel.run(x, [dense], None)], dim=-1))


@of_several
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


HALVES = [arithmetic for arithmetic in ARITHMETICS.values() if arithmetic.dtype.itemsize == 2]
in_halves = pytest.mark.parametrize("halves", HALVES, ids=lambda arithmetic: arithmetic.name)


STREAMED = [(768, 768, "gelu", False), (768, 1152, "none", True), (1024, 1024, "silu", True)]


@in_halves
@pytest.mark.parametrize(("in_features", "out_features", "activation", "with_residual"), STREAMED)
def test_streamed_weights(halves: Arithmetic, in_features: int, out_features: int, activation: str, with_residual: bool) -> None:
    """Also the moments of the result, of rows whose mean is far larger than their deviations, and of rows with one element that is."""
    rows, dtype, mode = 8451, halves.dtype, {torch.float16: "fp16", torch.bfloat16: "bf16"}[halves.dtype]
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

    comparable(out, plain(dtype), plain(torch.float64), halves.k)
    added = added.contiguous()
    added[::3] += 100
    added[1::3, 0] += 100
    y, moments = run_dense_moments(x, Dense(weight), added, None, mode)
    assert_equal(y, run_dense(x, Dense(weight), "none", added, None, mode))
    parts = y.double().unflatten(1, (moments.shape[1], -1))
    squares = (parts - parts.mean(dim=2, keepdim=True)).square().sum(dim=2)
    assert float((moments[..., 0] - parts.mean(dim=2)).abs().max()) < 1e-4
    assert float((moments[..., 1] / squares - 1).abs().max()) < 1e-3


def test_every_row_of_streamed_weights_is_there_and_changes_are_seen() -> None:
    """Of integers, whose products are exact: more rows than tiles, and fewer in the last tile."""
    weight = torch.randint(-1, 2, (768, 768), device="cuda").half()
    for rows in (6337, 25216, 25217):
        x = torch.randint(-2, 3, (rows, 768), device="cuda").half()
        for _ in range(2):
            expected = (x.float() @ weight.float().T + x.float()).half()
            assert_equal(run_dense(x, Dense(weight), "none", x, None, "fp16"), expected)
            check_replay(lambda x=x: run_dense(x, Dense(weight), "none", x, None, "fp16"))
            weight.neg_()


FUSED_LAYERS = (
    Architecture.of((1, 192, 48, 2), (2, 48, 192, 1)),
    Architecture.of((1, 48, 48, 3), (6, 24, 32, 1)),  # not chainable: classes of uneven size share tiles
    Architecture.of((1, 24, 24, 4), (4, 24, 96, 1)),
)


def tile_of(architecture: Architecture, mode: str) -> Tiling:
    tile = tiling(architecture, mode)
    assert isinstance(tile, Tiling), tile
    return tile


def configs_of(tile: Tiling) -> list[FusedConfig]:
    """The first candidate for each place of the intermediate."""
    found: dict[int, FusedConfig] = {}
    every = every_config(tile, shared_limit_of(0))
    for config in sorted(every, key=lambda config: (config.panel_columns, config.slots, config.warps), reverse=True):
        found.setdefault(config.u_shared, config)
    return list(found.values())


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_epilogues_of_fused_linears(mode: str, activation: str) -> None:
    """Of each mode and activation a layer, and its configurations by turns with a residual; so all pairs of these occur."""
    arithmetic, turn = ARITHMETICS[mode], [*ARITHMETICS].index(mode) + [*ACTIVATIONS].index(activation)
    architecture = FUSED_LAYERS[turn % len(FUSED_LAYERS)]
    x = make_input(333, architecture.in_features, arithmetic, device="cuda")
    factors = make_factors(architecture, arithmetic, device="cuda")
    bias = make_vector(architecture.out_features, arithmetic, device="cuda")
    added = make_input(333, architecture.out_features, arithmetic, device="cuda")
    tile = tile_of(architecture, mode)
    for place, config in enumerate(configs_of(tile)):
        residual = added if (place + turn) % 2 else None
        layer = FusedLinear(tile, config, 0)
        out = layer.run(x, layer.pack([(factors[0], factors[1])]), bias, residual, activation)
        check_epilogue(out, x, factors, bias, activation, residual, arithmetic)


def test_negative_inputs_vanish_without_a_trace(mode: str) -> None:
    """Far below zero each activation is -0 or tiny, never NaN, and far above it is the identity."""
    arithmetic, architecture = ARITHMETICS[mode], FUSED_LAYERS[0]
    factors = [torch.zeros_like(factor) for factor in make_factors(architecture, arithmetic, device="cuda")]
    x = make_input(333, architecture.in_features, arithmetic, device="cuda")
    tile = tile_of(architecture, mode)
    layer = FusedLinear(tile, configs_of(tile)[0], 0)
    image = layer.pack([(factors[0], factors[1])])
    for activation, compute in ACTIVATIONS.items():
        for value in (-1000.0, -30.0, 30.0, 1000.0):
            bias = torch.full((architecture.out_features,), value, device="cuda", dtype=arithmetic.dtype)
            assert_epilogue_bounded(layer.run(x, image, bias, None, activation), x, factors, bias, compute, None, arithmetic)


def plain(x: Tensor) -> Tensor:
    return x


def ranged(x: Tensor) -> Tensor:
    """Rows of 2^-20 to 2^12."""
    return x * torch.exp2(torch.arange(len(x), device=x.device) % 33 - 20.0)[:, None]


def spiked(x: Tensor) -> Tensor:
    """An element of 1e30 in every row, early or late in it."""
    rows = torch.arange(len(x), device=x.device)
    x[rows, rows * 7 % x.shape[1]] = 1e30
    return x


@pytest.mark.parametrize(("architecture", "linears"), [(gonon(384, 384), 3), (gonon(384, 1536), 1), (monarch(1536, 384), 1)], ids=str)
@pytest.mark.parametrize("kind", [plain, ranged, spiked])
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
