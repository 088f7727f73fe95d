"""The contract, kept by the dense backend on the CPU."""

import pytest

from flysurgery.factors import factors_to_dense
from flysurgery.patterns import Architecture
from tests.ops.contract import BackendContract
from tests.support.problems import ARCHITECTURES, make_factors, make_input, make_vector
from tests.support.tolerance import BF16, FP16, FP32, FP64, Arithmetic, assert_bounded


class TestDense(BackendContract):
    backend = "dense"
    modes = (FP64, FP32)  # in 16 bits the rounding of the product of the factors comes on top, which has a test of its own

    @pytest.mark.parametrize("mode", [FP16, BF16], ids=lambda mode: mode.name)
    @pytest.mark.parametrize("architecture", ARCHITECTURES, ids=str)
    def test_16_bits_are_those_of_the_rounded_product(self, architecture: Architecture, mode: Arithmetic) -> None:
        factors = make_factors(architecture, mode)
        x, bias = make_input(60, architecture.in_features, mode), make_vector(architecture.out_features, mode)
        matrix = factors_to_dense(factors)
        as_factor = matrix.view(1, *matrix.shape, 1)
        assert_bounded(self.run(x, factors, bias), x, [as_factor], bias, mode)
