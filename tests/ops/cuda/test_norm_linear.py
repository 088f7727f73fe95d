"""Linears behind a norm in one launch: what is folded into their weights, and what the operator hands to the kernel."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

from flysurgery.ops import FusedFactors, Norm, composed
from flysurgery.ops.cuda import norm_linear
from flysurgery.ops.cuda.met import recording
from flysurgery.ops.cuda.norm_linear import fold, run_norm_linear
from flysurgery.patterns import Architecture
from tests.ops.cuda.emulation import behind_a_norm
from tests.support.tolerance import FP32, assert_epilogue_comparable

SMALL = [
    Architecture.of((1, 32, 16, 2), (2, 16, 32, 1)),
    Architecture.of((1, 8, 24, 3), (6, 12, 5, 1)),
    Architecture.of((1, 6, 12, 2), (1, 12, 4, 2)),
]


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


@pytest.mark.parametrize("architecture", SMALL, ids=str)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("affine", ["none", "weight", "bias", "both"])
def test_what_is_folded_does_the_same_to_normalized_rows(architecture: Architecture, biased: bool, affine: str) -> None:
    torch.manual_seed(0)
    x = drawn(5, architecture.in_features)
    group = [
        FusedFactors(tuple(drawn(*pattern.factor_shape) for pattern in architecture), drawn(architecture.out_features) if biased else None)
        for _ in range(2)
    ]
    weight = drawn(architecture.in_features) if affine in ("weight", "both") else None
    shift = drawn(architecture.in_features) if affine in ("bias", "both") else None
    pairs, offset = fold([(m.factors[0], m.factors[1]) for m in group], [m.bias for m in group if m.bias is not None], weight, shift)
    plain = composed.norm_linear(x, Norm(None, None), [FusedFactors(tuple(factor.double() for factor in pair)) for pair in pairs])
    expected = composed.norm_linear(x, Norm(weight, shift), group)
    assert (offset is None) == (not biased and shift is None)
    torch.testing.assert_close(plain if offset is None else plain + offset, expected)


class Emulated:
    """The kernel by its definition, in float32; its image is the factors."""

    kernel: Emulated

    def __init__(self) -> None:
        self.kernel = self
        self.pairs: list[tuple[Tensor, ...]] = []

    def pack(self, linears: Sequence[Sequence[Tensor]]) -> Tensor:
        self.pairs = [tuple(factor.float() for factor in pair) for pair in linears]
        return torch.zeros(1)

    def run(self, x: Tensor, image: Tensor, bias: Tensor, *, activation: str, eps: float, early: bool) -> Tensor:
        return composed.ACTIVATIONS[activation](behind_a_norm(x, self.pairs, bias, eps))


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("affine", [False, True])
def test_the_operator_hands_everything_to_the_kernel(biased: bool, affine: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: None, raising=False)
    monkeypatch.setattr(norm_linear, "_norm_linears", lambda *key: Emulated())
    torch.manual_seed(0)
    architecture = SMALL[0]
    factors = [drawn(*pattern.factor_shape).float() for _ in range(3) for pattern in architecture]
    offsets = [drawn(architecture.out_features).float() if biased else None for _ in range(3)]
    group = [FusedFactors((factors[2 * n], factors[2 * n + 1]), offset) for n, offset in enumerate(offsets)]
    norm = Norm(drawn(64).float(), drawn(64).float(), 0.1) if affine else Norm(None, None, 0.1)
    x = drawn(32, 64).float()
    biases = [member.bias for member in group if member.bias is not None]
    with recording() as met:
        y = run_norm_linear(x, norm.weight, norm.bias, norm.eps, factors, biases, 3, "silu", "fp32")
    assert [rows for _, rows in met] == [32]
    wide = [FusedFactors(tuple(f.double() for f in m.factors), None if m.bias is None else m.bias.double()) for m in group]
    weight, shift = (None if part is None else part.double() for part in (norm.weight, norm.bias))
    exact = Norm(weight, shift, norm.eps)
    yardstick, truth = silu(composed.norm_linear(x, norm, group)), silu(composed.norm_linear(x.double(), exact, wide))
    assert_epilogue_comparable(y, yardstick, truth, FP32)
