"""The composed operators take dense layers and factors alike: a dense matrix is the factor (1, outputs, inputs, 1)."""

from __future__ import annotations

import torch

from flysurgery.ops import Dense, FusedFactors, composed
from tests.support.tolerance import assert_equal


def integers(*shape: int) -> torch.Tensor:
    return torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(len(shape) + shape[0])).double()


def test_dense_layers_are_factors_too() -> None:
    x, residual, scale = integers(5, 8), integers(5, 6), integers(6)
    weight, bias = integers(6, 8), integers(6)
    dense, factors = Dense(weight, bias), FusedFactors((weight[None, :, :, None],), bias)
    assert dense.sizes == factors.sizes == (8, 6)
    for layer in (dense, factors):
        assert_equal(composed.linear_residual(x, layer, residual, scale), residual + scale * (x @ weight.T + bias))


def test_the_filters_of_a_convolution_are_a_dense_layer() -> None:
    layer = Dense(integers(6, 3, 4, 4))
    assert layer.sizes == (48, 6)
    x = integers(2, 48)
    assert_equal(composed.linear_residual(x, layer, torch.zeros(2, 6).double()), x @ layer.weight.flatten(1).T)
