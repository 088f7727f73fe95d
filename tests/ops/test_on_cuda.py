"""The contract, kept on a CUDA device by the backends that PyTorch's own operators make up."""

from tests.ops.contract import CudaBackendContract
from tests.support.tolerance import FP32, FP64


class TestEinsumOnCuda(CudaBackendContract):
    backend = "einsum"
    bias_apart = True


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
