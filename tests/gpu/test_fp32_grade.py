"""Float32 by pairs of halves: at most twice the error of PyTorch's float32 products with the same factors."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from flysurgery.ops import BACKENDS
from flysurgery.ops.multiply import ks_linear_group
from flysurgery.patterns import Architecture, gonon, monarch
from tests.support.oracle import product
from tests.support.problems import LARGE_ROWS, make_factor, make_input
from tests.support.tolerance import FP32_BY_FP16_PAIRS

pytestmark = pytest.mark.gpu

LAYERS = [
    (gonon(384, 384), 3),
    (gonon(384, 1536), 1),
    (monarch(1536, 384), 1),
]


def plain(x: Tensor) -> Tensor:
    return x


def ranged(x: Tensor) -> Tensor:
    """Rows of 2^-20 to 2^12."""
    return x * torch.exp2(torch.arange(len(x), device=x.device) % 33 - 20.0)[:, None]


def spiked(x: Tensor) -> Tensor:
    """An element of 1e30 in every row, early or late in it."""
    rows = torch.arange(len(x), device=x.device)
    x[rows, rows * 7 % x.shape[1]] = 1e30
    return x


@pytest.mark.parametrize(("architecture", "linears"), LAYERS, ids=str)
@pytest.mark.parametrize("kind", [plain, ranged, spiked])
def test_the_error_is_at_most_twice_that_of_torch(architecture: Architecture, linears: int, kind: Callable[[Tensor], Tensor]) -> None:
    mode = FP32_BY_FP16_PAIRS
    factors = [
        [make_factor(pattern, mode, device="cuda", seed=2 * linear + side) for side, pattern in enumerate(architecture)]
        for linear in range(linears)
    ]
    x = kind(make_input(LARGE_ROWS[0], architecture.in_features, mode, device="cuda"))
    truth = torch.cat([product(x, own, None) for own in factors], dim=-1)

    def error(y: Tensor) -> float:
        """Relative to each row, over all rows."""
        return float(((y.double() - truth) / truth.norm(dim=1, keepdim=True)).norm())

    ours = error(ks_linear_group(x, factors, [None] * linears, backend="cuda"))
    torchs = error(torch.cat([BACKENDS["bmm"].bind(tuple(own), None)(x) for own in factors], dim=-1))
    assert ours <= 2 * torchs, f"{ours / torchs:.2f} times the error of float32 products"
