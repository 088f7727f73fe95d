"""The contract, kept by every backend: on the CPU, on CUDA by those that PyTorch's operators make up, and by our kernels in each mode."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flysurgery.factors import factors_to_dense
from flysurgery.ops import ks_linear
from flysurgery.patterns import Architecture
from tests.ops.contract import BackendContract, CudaBackendContract
from tests.patterns.strategies import pairs
from tests.support.problems import ARCHITECTURES, keep_bits, make_factors, make_input, make_vector
from tests.support.rounding import rounding_as
from tests.support.tolerance import BF16, FP16, FP32, FP32_BY_FP16_PAIRS, FP64, TF32, Arithmetic, assert_bounded

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
