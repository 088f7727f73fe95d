"""What every backend has to keep: on the CPU, on CUDA by those that PyTorch's operators make up, and by our kernels in each mode."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import cycle
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flysurgery.errors import BackendError
from flysurgery.factors import factors_to_dense
from flysurgery.ops import BACKENDS, Problem, ks_linear
from flysurgery.patterns import Architecture
from tests.patterns.strategies import pairs
from tests.support.levels import check_bound, check_identity, check_integers, check_layer
from tests.support.problems import (
    ARCHITECTURES,
    INPUTS,
    LARGE_ROWS,
    PATTERNS,
    SMALL_ROWS,
    in_third,
    keep_bits,
    make_factors,
    make_input,
    make_vector,
)
from tests.support.rounding import fresh_memory_is_nan, rounding_as
from tests.support.tolerance import (
    BF16,
    FP16,
    FP32,
    FP32_BY_FP16_PAIRS,
    FP64,
    MIN_OUTPUTS,
    TF32,
    Arithmetic,
    assert_bounded,
    assert_equal,
    assert_factor_gradient_bounded,
)

VIT_SQUARE, *_ = ARCHITECTURES
ODD = Architecture.of((2, 3, 4, 3), (1, 8, 5, 3))


@dataclass(frozen=True)
class Way:
    """A backend on a device. What it says that it cannot run has to be refused with that reason; everything else has to be right."""

    backend: str
    device: str = "cpu"
    modes: tuple[Arithmetic, ...] = (FP64, FP32, FP16, BF16)  # one for each dtype that it is tried in
    bias_apart: bool = True  # whether the bias is added to a result that was rounded to storage before
    repeats: bool = True  # whether a second call gives the same bits
    first_third: int = 0  # of the grid of patterns: that of the first mode

    def __str__(self) -> str:
        return f"{self.backend}-{self.device}-{self.modes[0].name}"

    def run(self, x: Tensor, factors: Sequence[Tensor], bias: Tensor | None) -> Tensor:
        return ks_linear(x, factors, bias, backend=self.backend)

    def yardstick(self, x: Tensor, factors: Sequence[Tensor], bias: Tensor | None) -> Tensor:
        """By bmm. cuBLAS has TF32 for blocks in multiples of four alone; for others, float32 products of rounded operands stand in."""
        if self.modes == (TF32,) and any(size % 4 for factor in factors for size in factor.shape[1:3]):
            for factor in reversed(factors):
                x = ks_linear(keep_bits(x, TF32.exact_bits), [keep_bits(factor, TF32.exact_bits)], backend="bmm")
            return x if bias is None else x + bias
        return ks_linear(x, factors, bias, backend="bmm")

    def modes_for(self, architecture: Architecture, rows: int = 1, *, requires_grad: bool = False) -> list[Arithmetic]:
        """Those that the backend says that it can; of the others it is checked that a call is refused with the reason."""
        found = []
        for mode in self.modes:
            problem = Problem(architecture, rows, mode.dtype, self.device, requires_grad=requires_grad)
            obstacle = BACKENDS[self.backend].can_run(problem)
            if obstacle is None:
                found.append(mode)
                continue
            x = make_input(rows, architecture.in_features, mode, device=self.device).requires_grad_(requires_grad)
            with pytest.raises(BackendError, match=re.escape(obstacle)):
                self.run(x, make_factors(architecture, mode, device=self.device), None)
        return found


# The last one adds the bias before it rounds. In 16 bits the rounding of the product of the factors comes on top, which has its own test.
CPU_WAYS = [*map(Way, ("einsum", "bmm", "chunked", "bsr", "sparse")), Way("dense", modes=(FP64, FP32), bias_apart=False)]
CUDA_WAYS = [Way(name, "cuda", (FP32, FP16, BF16)) for name in ("bmm", "bsr")]
CUDA_WAYS += [Way("sparse", "cuda", (FP32, FP16, BF16), repeats=False)]  # cuSPARSE sums in no fixed order
CUDA_WAYS += [Way("dense", "cuda", (FP32, FP64), bias_apart=False)]
OWN_WAYS = [
    Way("cuda", "cuda", (FP32_BY_FP16_PAIRS, FP16, BF16), bias_apart=False),
    Way("cuda", "cuda", (TF32,), bias_apart=False, first_third=1),
]


def each_way(*ways: Way) -> Any:
    return pytest.mark.parametrize(
        "way", [pytest.param(way, marks=[pytest.mark.gpu] * (way.device == "cuda")) for way in ways], ids=str, indirect=True
    )


every = each_way(*CPU_WAYS, *CUDA_WAYS, *OWN_WAYS)
two_layers = pytest.mark.parametrize("architecture", [VIT_SQUARE, ODD], ids=str)


@pytest.fixture
def way(request: pytest.FixtureRequest) -> Iterator[Way]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the problems are small, and waiting for a second thread costs more than it brings
    with fresh_memory_is_nan(), rounding_as("tf32" if request.param.modes == (TF32,) else "fp32"):
        yield request.param
    torch.set_num_threads(threads)


@every
@pytest.mark.parametrize("d", sorted({pattern.d for pattern in PATTERNS}))
@pytest.mark.parametrize("a", sorted({pattern.a for pattern in PATTERNS}))
def test_one_factor(way: Way, a: int, d: int) -> None:
    """Exact data, and, of some patterns, every kind of numbers. Each mode takes another third of the grid, float64 none."""
    for pattern in (pattern for pattern in PATTERNS if (pattern.a, pattern.d) == (a, d)):
        thirds = [mode for n, mode in enumerate(way.modes) if mode is not FP64 and in_third(pattern, way.first_third + n)]
        for mode in replace(way, modes=tuple(thirds)).modes_for(Architecture((pattern,))):
            check_identity(way.run, pattern, mode, way.device)
            for rows in SMALL_ROWS:
                check_integers(way.run, Architecture((pattern,)), rows, mode, way.device)
            for kind in INPUTS if a != 1 and d != 2 else ():
                check_bound(way.run, kind, pattern, 33, mode, way.device)


@every
@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=str)
def test_several_factors_are_exact_and_layers_as_accurate_as_torch(way: Way, architecture: Architecture) -> None:
    for mode in way.modes_for(architecture):
        check_integers(way.run, architecture, architecture.in_features, mode, way.device)
        rows = 700 if way.device == "cuda" else max(150, 1 + MIN_OUTPUTS // architecture.out_features)
        check_layer(way.run, way.yardstick, architecture, rows, mode, way.device, bias_apart=way.bias_apart)


@every
@two_layers
def test_any_leading_shape_and_strides(way: Way, architecture: Architecture) -> None:
    for mode in way.modes_for(architecture, rows=40):
        factors, n = make_factors(architecture, mode, device=way.device), architecture.in_features
        wide = make_input(40, 2 * n + 1, mode, device=way.device)
        views = [wide[0, :n].view(*shape, n) for shape in ((), (1,))] + [wide[:0, :n].view(*shape, n) for shape in ((0,), (2, 0))]
        views += [
            wide[:, 1 : n + 1],  # rows off every vector alignment
            wide[::2, :n],
            wide[:, : 2 * n : 2],
            wide.flatten()[: 40 * n].view(n, 40).mT,
            wide[:1, :n].expand(40, n),
            wide[:, :n].unflatten(0, (5, 8)).transpose(0, 1),
            wide[:6, :n].unflatten(0, (1, 2, 3)),
        ]
        for x in views:
            out = way.run(x, factors, None)
            assert out.shape == (*x.shape[:-1], architecture.out_features) and out.dtype == x.dtype
            assert_bounded(out.reshape(-1, architecture.out_features), x.reshape(-1, n), factors, None, mode)
        transposed = [factor.mT.contiguous().mT for factor in factors]
        assert_bounded(way.run(wide[:, :n], transposed, None), wide[:, :n], factors, None, mode)


@every
@two_layers
def test_inputs_stay_results_are_fresh_and_repeat_and_changed_weights_are_seen(way: Way, architecture: Architecture) -> None:
    for mode in way.modes_for(architecture, rows=40):
        factors = make_factors(architecture, mode, device=way.device)
        bias = make_vector(architecture.out_features, mode, device=way.device)
        x = make_input(40, architecture.in_features, mode, device=way.device)
        operands = [x, bias, *factors]
        before = [operand.clone() for operand in operands]
        first = way.run(x, factors, bias)
        kept = first.clone()
        second = way.run(x, factors, bias)
        if way.repeats:
            assert_equal(second, kept)
        second.zero_()
        assert_equal(first, kept)
        for operand, copy in zip(operands, before, strict=True):
            assert_equal(operand, copy)
        for factor in factors:
            factor.mul_(-0.5)
        changed = way.run(x, factors, bias)
        assert_bounded(changed, x, factors, bias, mode, bias_apart=way.bias_apart)


@every
@pytest.mark.parametrize("rows", [1, 300])
@two_layers
def test_gradients(way: Way, architecture: Architecture, rows: int) -> None:
    for mode in way.modes_for(architecture, rows, requires_grad=True):
        x = make_input(rows, architecture.in_features, mode, device=way.device).requires_grad_()
        dy = make_input(rows, architecture.out_features, mode, device=way.device)
        factors = [factor.requires_grad_() for factor in make_factors(architecture, mode, device=way.device)]
        bias = make_vector(architecture.out_features, mode, device=way.device).requires_grad_()
        dx, dbias, *dfactors = torch.autograd.grad(way.run(x, factors, bias), (x, bias, *factors), dy)
        assert_bounded(dx, dy, [factor.detach().transpose(1, 2) for factor in reversed(factors)], None, mode)
        ones = dy.new_ones(architecture.out_features, 1, rows, 1)  # the sum of dy over rows as one row times a factor
        assert_bounded(dbias[None], dy.mT.reshape(1, -1), [ones], None, mode)
        for index, gradient in enumerate(dfactors):
            assert_factor_gradient_bounded(gradient, index, x.detach(), [factor.detach() for factor in factors], dy, mode)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("way", "architecture", "rows"), [*zip(cycle(CUDA_WAYS), ARCHITECTURES, cycle(LARGE_ROWS))], ids=str, indirect=["way"]
)
def test_large_batches(way: Way, architecture: Architecture, rows: int) -> None:
    for mode in way.modes_for(architecture, rows):
        check_layer(way.run, way.yardstick, architecture, rows, mode, way.device, bias_apart=way.bias_apart)


@pytest.mark.parametrize("mode", [FP16, BF16], ids=lambda mode: mode.name)
@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=str)
def test_16_bits_of_dense_are_those_of_the_rounded_product(architecture: Architecture, mode: Arithmetic) -> None:
    factors = make_factors(architecture, mode)
    x, bias = make_input(60, architecture.in_features, mode), make_vector(architecture.out_features, mode)
    matrix = factors_to_dense(factors)
    assert_bounded(ks_linear(x, factors, bias, backend="dense"), x, [matrix.view(1, *matrix.shape, 1)], bias, mode)


@settings(max_examples=100, deadline=None)
@given(pairs(), st.integers(0, 70), st.booleans(), st.integers(1, 3), st.sampled_from(CPU_WAYS))
def test_any_two_factors_rows_and_strides(architecture: Architecture, rows: int, biased: bool, stride: int, way: Way) -> None:
    factors, bias = make_factors(architecture, FP32), make_vector(architecture.out_features, FP32) if biased else None
    x = make_input(rows, architecture.in_features * stride, FP32)[:, ::stride]
    assert_bounded(way.run(x, factors, bias), x, factors, bias, FP32, bias_apart=way.bias_apart)
