"""The contract, kept by the bsr backend on the CPU."""

from tests.ops.contract import BackendContract


class TestBsr(BackendContract):
    backend = "bsr"
    bias_apart = True
