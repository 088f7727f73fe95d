"""A small layer on the GPU, and its checks, for the tests that run there."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from flysurgery.ops import ks_linear
from flysurgery.patterns import Architecture
from tests.support.problems import make_factors, make_input, make_vector
from tests.support.tolerance import FP16, FP32_BY_FP16_PAIRS, OF_DTYPE, Arithmetic, assert_bounded

SQUARE = Architecture.of((1, 192, 48, 2), (2, 48, 192, 1))
DEEP = Architecture.of((1, 64, 64, 4), (4, 32, 32, 2), (8, 32, 32, 1))


class Layer(nn.Module):
    """What ButterflyLinear does, with the backend named."""

    def __init__(self, architecture: Architecture = SQUARE, mode: Arithmetic = FP16, device: str = "cuda") -> None:
        super().__init__()
        self.factors = nn.ParameterList([nn.Parameter(factor) for factor in make_factors(architecture, mode, device=device)])
        self.bias = nn.Parameter(make_vector(architecture.out_features, mode, device=device))

    def forward(self, x: Tensor) -> Tensor:
        return ks_linear(x, tuple(self.factors), self.bias, backend="cuda")


def rows_of(rows: int, mode: Arithmetic = FP16, architecture: Architecture = SQUARE, device: str = "cuda") -> Tensor:
    return make_input(rows, architecture.in_features, mode, device=device)


def check(out: Tensor, layer: Layer, x: Tensor) -> None:
    check_product(out, x, tuple(layer.factors), layer.bias)


def check_product(out: Tensor, x: Tensor, factors: Sequence[Tensor], bias: Tensor) -> None:
    factors = [factor.detach().to(x.dtype) for factor in factors]
    assert_bounded(out.detach(), x, factors, bias.detach().to(x.dtype), (OF_DTYPE | {torch.float32: FP32_BY_FP16_PAIRS})[x.dtype])
