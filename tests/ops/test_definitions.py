"""What the operations mean, of dense layers and factors, and what is remembered of them."""

import torch
from torch import Tensor
from torch.nn.functional import layer_norm, linear, silu

from flysurgery.ops import Dense, FeedForward, FusedFactors, Gated, LinearResidual, Norm
from flysurgery.ops.as_dense import side_by_side
from flysurgery.ops.one_launch import multiplied
from tests.support.tolerance import assert_equal


def integers(*shape: int) -> Tensor:
    return torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(sum(shape))).double()


def test_dense_layers_are_factors_and_filters_are_dense_layers() -> None:
    x, residual, scale, weight, bias = integers(5, 48), integers(5, 6), integers(6), integers(6, 3, 4, 4), integers(6)
    matrix = weight.flatten(1)
    for layer in (Dense(matrix, bias), FusedFactors((matrix[None, :, :, None],), bias), Dense(weight, bias)):
        assert layer.sizes == (48, 6)
        assert_equal(LinearResidual(layer, residual, scale).plainly(x), residual + scale * (x @ matrix.T + bias))


def test_gate_and_value_are_two_layers_or_the_halves_of_one() -> None:
    x, weights, biases, down = integers(5, 8), integers(12, 8), integers(12), Dense(integers(8, 6))
    gate, value = linear(x, weights, biases).split(6, dim=1)
    expected = x + integers(8) * (layer_norm(silu(gate) * value, (6,), eps=0.1) @ down.weight.T)
    parts = [Dense(weight, bias) for weight, bias in zip(weights.split(6), biases.split(6), strict=True)]
    turned = Dense(weights.roll(6, 0), biases.roll(6))
    for up in (Gated((*parts,)), Gated((*parts[::-1],), 1), Gated((Dense(weights, biases),)), Gated((turned,), 1)):
        assert up.sizes == (8, 6)
        found = FeedForward(None, up, down, "silu", integers(8), inner=Norm(None, None, 0.1)).plainly(x)
        torch.testing.assert_close(found, expected)


def test_linears_side_by_side_are_one_dense_layer_until_a_weight_changes() -> None:
    x, bias = integers(5, 6), integers(6)
    group = FusedFactors((integers(1, 3, 3, 2), integers(2, 3, 3, 1)), bias), Dense(integers(4, 6))
    for _ in range(2):
        one = side_by_side(group, x.dtype)
        assert_equal(linear(x, one.weight, one.bias), torch.cat([multiplied(x, each) for each in group], dim=-1))
        assert side_by_side(group, x.dtype).weight is one.weight
        group[0].factors[1].mul_(2)
