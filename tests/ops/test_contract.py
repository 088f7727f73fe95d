"""What every backend has to keep: on the CPU, on CUDA by those that PyTorch's operators make up, and by our kernels in each mode."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flysurgery.errors import BackendError
from flysurgery.factors import factors_to_dense
from flysurgery.ops import BACKENDS, Problem, ks_linear
from flysurgery.patterns import Architecture, Pattern
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


class BackendContract:
    """Inherit as ``TestX``, name the backend, and set ``device`` and ``modes``, one for each dtype that it should be tried in.

    A problem that the backend says it cannot run has to be refused with that reason; everything else has to be right.
    """

    backend: ClassVar[str]
    device: ClassVar[str] = "cpu"
    modes: ClassVar[tuple[Arithmetic, ...]] = (FP64, FP32, FP16, BF16)
    bias_apart: ClassVar[bool] = False
    """Whether the bias is added to a result that was rounded to storage before."""
    repeats: ClassVar[bool] = True
    """Whether a second call gives the same bits."""
    first_third: ClassVar[int] = 0
    """Of the grid of patterns: that of the first mode."""

    @pytest.fixture(autouse=True)
    def _settings(self) -> Iterator[None]:
        if self.device == "cuda" and not torch.cuda.is_available():
            pytest.skip("needs a CUDA device, and torch.cuda.is_available() is False here")
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # the problems are small, and waiting for a second thread costs more than it brings
        with fresh_memory_is_nan():
            yield
        torch.set_num_threads(threads)

    def run(self, x: Tensor, factors: Sequence[Tensor], bias: Tensor | None) -> Tensor:
        return ks_linear(x, factors, bias, backend=self.backend)

    def yardstick(self, x: Tensor, factors: Sequence[Tensor], bias: Tensor | None) -> Tensor:
        return ks_linear(x, factors, bias, backend="bmm")

    def runs(self, architecture: Architecture, mode: Arithmetic, rows: int, *, bias: bool = False, requires_grad: bool = False) -> bool:
        """Whether the backend says that it can; where it cannot, it is checked that a call is refused with the reason."""
        problem = Problem(architecture, rows, mode.dtype, self.device, bias=bias, requires_grad=requires_grad)
        obstacle = BACKENDS[self.backend].can_run(problem)
        if obstacle is None:
            return True
        x = make_input(rows, architecture.in_features, mode, device=self.device).requires_grad_(requires_grad)
        with pytest.raises(BackendError) as refusal:
            self.run(x, make_factors(architecture, mode, device=self.device), None)
        assert obstacle in str(refusal.value)
        return False

    def modes_for(self, architecture: Architecture, rows: int = 1, *, requires_grad: bool = False) -> list[Arithmetic]:
        return [mode for mode in self.modes if self.runs(architecture, mode, rows, requires_grad=requires_grad)]

    def pattern_modes(self, pattern: Pattern) -> list[Arithmetic]:
        """Modes for a pattern of the grid: each takes another third of it, from ``first_third`` on; float64, as float32 goes, none."""
        modes = [mode for mode in self.modes if mode is not FP64 and in_third(pattern, self.first_third + self.modes.index(mode))]
        return [mode for mode in modes if self.runs(Architecture((pattern,)), mode, 1)]

    @pytest.mark.parametrize("d", sorted({pattern.d for pattern in PATTERNS}))
    @pytest.mark.parametrize("a", sorted({pattern.a for pattern in PATTERNS}))
    def test_one_factor(self, a: int, d: int) -> None:
        """Exact data, and, of some patterns, every kind of numbers: the others differ in nothing but numbers."""
        for pattern in (pattern for pattern in PATTERNS if (pattern.a, pattern.d) == (a, d)):
            for mode in self.pattern_modes(pattern):
                check_identity(self.run, pattern, mode, self.device)
                for rows in SMALL_ROWS:
                    check_integers(self.run, Architecture((pattern,)), rows, mode, self.device)
                for kind in INPUTS if a != 1 and d != 2 else ():
                    check_bound(self.run, kind, pattern, 33, mode, self.device)

    @pytest.mark.parametrize("architecture", ARCHITECTURES, ids=str)
    def test_several_factors_are_exact_and_layers_as_accurate_as_torch(self, architecture: Architecture) -> None:
        for mode in self.modes_for(architecture):
            check_integers(self.run, architecture, architecture.in_features, mode, self.device)
            rows = 700 if self.device == "cuda" else max(150, 1 + MIN_OUTPUTS // architecture.out_features)
            check_layer(self.run, self.yardstick, architecture, rows, mode, self.device, bias_apart=self.bias_apart)

    @pytest.mark.parametrize("architecture", [VIT_SQUARE, ODD], ids=str)
    def test_any_leading_shape_and_strides(self, architecture: Architecture) -> None:
        for mode in self.modes_for(architecture, rows=40):
            factors, n = make_factors(architecture, mode, device=self.device), architecture.in_features
            wide = make_input(40, 2 * n + 1, mode, device=self.device)
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
                out = self.run(x, factors, None)
                assert out.shape == (*x.shape[:-1], architecture.out_features) and out.dtype == x.dtype
                assert_bounded(out.reshape(-1, architecture.out_features), x.reshape(-1, n), factors, None, mode)
            transposed = [factor.mT.contiguous().mT for factor in factors]
            assert_bounded(self.run(wide[:, :n], transposed, None), wide[:, :n], factors, None, mode)

    @pytest.mark.parametrize("architecture", [VIT_SQUARE, ODD], ids=str)
    def test_inputs_stay_results_are_fresh_and_repeat_and_changed_weights_are_seen(self, architecture: Architecture) -> None:
        for mode in self.modes_for(architecture, rows=40):
            factors = make_factors(architecture, mode, device=self.device)
            bias = make_vector(architecture.out_features, mode, device=self.device)
            x = make_input(40, architecture.in_features, mode, device=self.device)
            operands = [x, bias, *factors]
            before = [operand.clone() for operand in operands]
            first = self.run(x, factors, bias)
            kept = first.clone()
            second = self.run(x, factors, bias)
            if self.repeats:
                assert_equal(second, kept)
            second.zero_()
            assert_equal(first, kept)
            for operand, copy in zip(operands, before, strict=True):
                assert_equal(operand, copy)
            for factor in factors:
                factor.mul_(-0.5)
            changed = self.run(x, factors, bias)
            assert_bounded(changed, x, factors, bias, mode, bias_apart=self.bias_apart)

    @pytest.mark.parametrize("rows", [1, 300])
    @pytest.mark.parametrize("architecture", [VIT_SQUARE, ODD], ids=str)
    def test_gradients(self, architecture: Architecture, rows: int) -> None:
        for mode in self.modes_for(architecture, rows, requires_grad=True):
            x = make_input(rows, architecture.in_features, mode, device=self.device).requires_grad_()
            dy = make_input(rows, architecture.out_features, mode, device=self.device)
            factors = [factor.requires_grad_() for factor in make_factors(architecture, mode, device=self.device)]
            bias = make_vector(architecture.out_features, mode, device=self.device).requires_grad_()
            dx, dbias, *dfactors = torch.autograd.grad(self.run(x, factors, bias), (x, bias, *factors), dy)
            assert_bounded(dx, dy, [factor.detach().transpose(1, 2) for factor in reversed(factors)], None, mode)
            assert_bounded(dbias[None], *_as_product_with_ones(dy), None, mode)
            for index, gradient in enumerate(dfactors):
                assert_factor_gradient_bounded(gradient, index, x.detach(), [factor.detach() for factor in factors], dy, mode)


@pytest.mark.gpu
class CudaBackendContract(BackendContract):
    """The same on a CUDA device, and with large batches."""

    device: ClassVar[str] = "cuda"
    modes: ClassVar[tuple[Arithmetic, ...]] = (FP32, FP16, BF16)

    @pytest.mark.parametrize(("architecture", "rows"), [*zip(ARCHITECTURES, itertools.cycle(LARGE_ROWS))], ids=str)
    def test_large_batches(self, architecture: Architecture, rows: int) -> None:
        for mode in self.modes_for(architecture, rows):
            check_layer(self.run, self.yardstick, architecture, rows, mode, self.device, bias_apart=self.bias_apart)


def _as_product_with_ones(dy: Tensor) -> tuple[Tensor, list[Tensor]]:
    """The bias gradient, the sum of dy over rows, as one row times a factor of ones."""
    rows, features = dy.shape
    return dy.mT.reshape(1, -1), [dy.new_ones(features, 1, rows, 1)]


ON_CPU = ("einsum", "bmm", "chunked", "bsr", "sparse", "dense")


@settings(max_examples=100, deadline=None)
@given(pairs(), st.integers(0, 70), st.booleans(), st.integers(1, 3), st.sampled_from(ON_CPU))
def test_any_two_factors_rows_and_strides(architecture: Architecture, rows: int, biased: bool, stride: int, backend: str) -> None:
    factors, bias = make_factors(architecture, FP32), make_vector(architecture.out_features, FP32) if biased else None
    x = make_input(rows, architecture.in_features * stride, FP32)[:, ::stride]
    out = ks_linear(x, factors, bias, backend=backend)
    assert_bounded(out, x, factors, bias, FP32, bias_apart=backend != "dense")


class TestEinsum(BackendContract):
    backend = "einsum"
    bias_apart = True


class TestBmm(BackendContract):
    backend = "bmm"
    bias_apart = True


class TestChunked(BackendContract):
    backend = "chunked"
    bias_apart = True  # where the left factor has a > 1


class TestBsr(BackendContract):
    backend = "bsr"
    bias_apart = True


class TestSparse(BackendContract):
    backend = "sparse"
    bias_apart = True


class TestDense(BackendContract):
    backend = "dense"
    modes = (FP64, FP32)  # in 16 bits the rounding of the product of the factors comes on top, which has a test of its own

    @pytest.mark.parametrize("mode", [FP16, BF16], ids=lambda mode: mode.name)
    @pytest.mark.parametrize("architecture", ARCHITECTURES, ids=str)
    def test_16_bits_are_those_of_the_rounded_product(self, architecture: Architecture, mode: Arithmetic) -> None:
        factors = make_factors(architecture, mode)
        x, bias = make_input(60, architecture.in_features, mode), make_vector(architecture.out_features, mode)
        matrix = factors_to_dense(factors)
        assert_bounded(self.run(x, factors, bias), x, [matrix.view(1, *matrix.shape, 1)], bias, mode)


class TestBmmOnCuda(CudaBackendContract):
    backend = "bmm"
    bias_apart = True


class TestDenseOnCuda(CudaBackendContract):
    backend = "dense"
    modes = (FP32, FP64)  # the reason stands at the tests on the CPU


class TestBsrOnCuda(CudaBackendContract):
    backend = "bsr"
    bias_apart = True


class TestSparseOnCuda(CudaBackendContract):
    backend = "sparse"
    bias_apart = True
    repeats = False  # cuSPARSE sums in no fixed order


@pytest.mark.gpu
class TestCuda(BackendContract):
    backend = "cuda"
    device = "cuda"
    modes = (FP32_BY_FP16_PAIRS, FP16, BF16)


@pytest.mark.gpu
class TestCudaTf32(BackendContract):
    backend = "cuda"
    device = "cuda"
    modes = (TF32,)
    first_third = 1

    def yardstick(self, x: Tensor, factors: Sequence[Tensor], bias: Tensor | None) -> Tensor:
        """cuBLAS has TF32 for blocks in multiples of four alone; for others, float32 products of rounded operands stand in."""
        if not any(size % 4 for factor in factors for size in factor.shape[1:3]):
            return super().yardstick(x, factors, bias)
        for factor in reversed(factors):
            x = super().yardstick(keep_bits(x, TF32.exact_bits), [keep_bits(factor, TF32.exact_bits)], None)
        return x if bias is None else x + bias

    @pytest.fixture(autouse=True)
    def _tf32_is_allowed(self) -> Iterator[None]:
        with rounding_as("tf32"):
            yield
