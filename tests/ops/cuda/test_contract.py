"""The contract, kept by the CUDA kernels in each of their modes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.ops.contract import BackendContract
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

    @pytest.fixture(autouse=True)
    def _tf32_is_allowed(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("high")
        yield
        torch.set_float32_matmul_precision(before)


class TestCudaExact(BackendContract):
    backend = "cuda-exact"
    device = "cuda"
    modes = (FP32,)
