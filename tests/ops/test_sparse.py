"""The contract, kept by the sparse backend on the CPU."""

from tests.ops.contract import BackendContract


class TestSparse(BackendContract):
    backend = "sparse"
    bias_apart = True
