"""A small layer whose weights are packed, for the emulated kernels, and its check."""

from __future__ import annotations

from torch import Tensor, nn

from flysurgery.gpu.run_product import run_product
from flysurgery.patterns import Architecture
from tests.support.problems import make_factors, make_vector
from tests.support.tolerance import FP64, OF_DTYPE, assert_bounded

LAYER = Architecture.of((2, 3, 4, 3), (1, 8, 5, 3))


class Layer(nn.Module):
    """Factors and a bias, as ButterflyLinear holds them."""

    def __init__(self) -> None:
        super().__init__()
        self.factors = nn.ParameterList([nn.Parameter(factor) for factor in make_factors(LAYER, FP64)])
        self.bias = nn.Parameter(make_vector(LAYER.out_features, FP64))

    def forward(self, x: Tensor) -> Tensor:
        return run_product(x, tuple(self.factors), (self.bias,), 1, "fp32")


def check(layer: Layer, x: Tensor) -> None:
    assert_bounded(layer(x), x, tuple(layer.factors), layer.bias, OF_DTYPE[x.dtype])
