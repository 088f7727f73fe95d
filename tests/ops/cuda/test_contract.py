"""The contract, kept by the CUDA kernels in each of their modes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
from torch import Tensor

from tests.ops.contract import BackendContract
from tests.support.problems import keep_bits
from tests.support.rounding import rounding_as
from tests.support.tolerance import BF16, FP16, FP32, FP32_BY_FP16_PAIRS, TF32

pytestmark = pytest.mark.gpu


class TestCuda(BackendContract):
    backend = "cuda"
    device = "cuda"
    modes = (FP32_BY_FP16_PAIRS, FP16, BF16)


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


class TestCudaExact(BackendContract):
    backend = "cuda-exact"
    device = "cuda"
    modes = (FP32,)
    first_third = 2
