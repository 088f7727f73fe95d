"""The contract, kept by the einsum backend on the CPU."""

from tests.ops.contract import BackendContract


class TestEinsum(BackendContract):
    backend = "einsum"
    bias_apart = True
