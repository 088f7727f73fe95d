"""The 1x1 convolution of factors against torch's own."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from flysurgery.factors import factors_to_dense
from flysurgery.layers import ButterflyConv
from flysurgery.patterns import monarch
from tests.support.tolerance import assert_equal


@pytest.mark.parametrize("axes", [1, 2, 3])
def test_against_a_dense_convolution(axes: int) -> None:
    torch.manual_seed(0)
    layer = ButterflyConv(monarch(16, 8, nblocks=2), axes=axes)
    dense = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[axes - 1](8, 16, 1)
    with torch.no_grad():  # small integers, whose products and sums are exact in any order
        for parameter in layer.parameters():
            parameter.copy_(torch.randint(-3, 4, parameter.shape))
        dense.weight.copy_(factors_to_dense(list(layer.factors))[(..., *(None,) * axes)])
        assert dense.bias is not None and layer.bias is not None
        dense.bias.copy_(layer.bias)
        x = torch.randint(-3, 4, (2, 8, *(3, 4, 5)[:axes])).float()
        for image in (x, x[0], x.transpose(0, 1).contiguous().transpose(0, 1)):
            assert_equal(layer(image), dense(image))
        if axes == 2:
            assert layer(x).is_contiguous()
            assert layer(x.to(memory_format=torch.channels_last)).is_contiguous(memory_format=torch.channels_last)
