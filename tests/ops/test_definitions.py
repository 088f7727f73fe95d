"""The definitions of the operations take dense layers and factors alike: a dense matrix is the factor (1, outputs, inputs, 1)."""

from __future__ import annotations

import torch

from flysurgery.ops import Dense, FeedForward, FusedFactors, Gated, LinearResidual, Norm
from tests.support.tolerance import assert_equal


def integers(*shape: int) -> torch.Tensor:
    return torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(len(shape) + shape[0])).double()


def test_dense_layers_are_factors_too() -> None:
    x, residual, scale = integers(5, 8), integers(5, 6), integers(6)
    weight, bias = integers(6, 8), integers(6)
    dense, factors = Dense(weight, bias), FusedFactors((weight[None, :, :, None],), bias)
    assert dense.sizes == factors.sizes == (8, 6)
    for layer in (dense, factors):
        assert_equal(LinearResidual(layer, residual, scale).plainly(x), residual + scale * (x @ weight.T + bias))


def test_the_filters_of_a_convolution_are_a_dense_layer() -> None:
    layer = Dense(integers(6, 3, 4, 4))
    assert layer.sizes == (48, 6)
    x = integers(2, 48)
    assert_equal(LinearResidual(layer, torch.zeros(2, 6).double()).plainly(x), x @ layer.weight.flatten(1).T)


def test_gate_and_value_are_two_layers_or_the_halves_of_one() -> None:
    x, gate, value, down = (
        integers(5, 8),
        Dense(integers(6, 8), integers(6)),
        Dense(integers(12, 8)[6:], integers(12)[6:]),
        Dense(integers(8, 6)),
    )
    assert gate.bias is not None and value.bias is not None
    g, v = x @ gate.weight.T + gate.bias, x @ value.weight.T + value.bias
    hidden = torch.nn.functional.layer_norm(torch.nn.functional.silu(g) * v, (6,), eps=0.1)
    expected = x + integers(8) * (hidden @ down.weight.T)
    for place, (one, other) in enumerate(((gate, value), (value, gate))):
        assert one.bias is not None and other.bias is not None
        both = Dense(torch.cat([one.weight, other.weight]), torch.cat([one.bias, other.bias]))
        for up in (Gated((one, other), place), Gated((both,), place)):
            assert up.sizes == (8, 6)
            found = FeedForward(None, up, down, "silu", integers(8), inner=Norm(None, None, 0.1)).plainly(x)
            torch.testing.assert_close(found, expected)
