"""The contract, kept by the bmm backend on the CPU."""

from tests.ops.contract import BackendContract


class TestBmm(BackendContract):
    backend = "bmm"
    bias_apart = True
