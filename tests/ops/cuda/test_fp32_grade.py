"""Float32 by pairs of halves: at most twice the error of PyTorch's float32 product with the same matrix, dense."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from flysurgery.factors import factors_to_dense
from flysurgery.ops import ks_linear
from flysurgery.patterns import Architecture, gonon, monarch
from tests.support.problems import make_factors, make_input
from tests.support.tolerance import FP32_BY_FP16_PAIRS

pytestmark = pytest.mark.gpu

LAYERS = [
    gonon(384, 384),
    gonon(1536, 384),
    gonon(384, 1536),
    monarch(384, 384),
    monarch(1536, 384),
    monarch(384, 1536),
]
ROWS = 700


def plain(x: Tensor) -> Tensor:
    return x


def ranged(x: Tensor) -> Tensor:
    """Rows of 2^-20 to 2^12."""
    return x * torch.exp2(torch.arange(len(x), device=x.device) % 33 - 20.0)[:, None]


def spiked(x: Tensor) -> Tensor:
    """An element of 1e30 in every second row, early or late in it."""
    rows = torch.arange(0, len(x), 2, device=x.device)
    x[rows, rows * 7 % x.shape[1]] = 1e30
    return x


@pytest.mark.parametrize("architecture", LAYERS, ids=str)
@pytest.mark.parametrize("kind", [plain, ranged, spiked])
def test_the_error_is_at_most_twice_that_of_torch(architecture: Architecture, kind: Callable[[Tensor], Tensor]) -> None:
    factors = make_factors(architecture, FP32_BY_FP16_PAIRS, device="cuda")
    x = kind(make_input(ROWS, architecture.in_features, FP32_BY_FP16_PAIRS, device="cuda"))
    truth = ks_linear(x.double(), [factor.double() for factor in factors], None)
    scale = truth.norm(dim=1, keepdim=True)

    def error(y: Tensor) -> float:
        return float(((y.double() - truth) / scale).norm())

    ours = error(ks_linear(x, factors, None, backend="cuda"))
    dense = error(x @ factors_to_dense([factor.double() for factor in factors]).float().T)
    assert ours <= 2 * dense, f"{ours / dense:.2f} times the error of a float32 product"
