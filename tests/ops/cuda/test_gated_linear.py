"""A layer whose outputs are a gate and a value, in one launch: what the operator hands to the kernel."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from flysurgery.ops import FusedFactors, Gated, Norm, composed
from flysurgery.ops.cuda import gated_linear
from flysurgery.ops.cuda.gated_linear import run_gated_linear
from flysurgery.ops.cuda.met import recording
from flysurgery.ops.cuda.tiling import tiling
from flysurgery.patterns import Architecture
from tests.ops.cuda.emulation import behind_a_norm
from tests.support.tolerance import FP32, assert_epilogue_comparable

WIDE = Architecture.of((1, 32, 16, 2), (2, 16, 32, 1))


class Emulated:
    """The kernel by its definition; its image is the factors."""

    kernel: Emulated

    def __init__(self, norm: bool) -> None:
        self.kernel, self.norm = self, norm
        self.factors: tuple[Tensor, ...] = ()

    def pack(self, linears: Sequence[Sequence[Tensor]]) -> Tensor:
        (self.factors,) = [tuple(factor.float() for factor in pair) for pair in linears]
        return torch.zeros(1)

    def run(self, x: Tensor, image: Tensor, bias: Tensor | None, residual: None, activation: str, eps: float, early: bool) -> Tensor:
        if self.norm:
            assert bias is not None
            y = behind_a_norm(x, [self.factors], bias, eps)
        else:
            y = composed.linear_residual(x, FusedFactors(self.factors, bias), torch.zeros(()))
        gate, value = y.chunk(2, dim=-1)
        return composed.ACTIVATIONS[activation](gate) * value


def in_double(part: Tensor | None) -> Tensor | None:
    return None if part is None else part.double()


@pytest.mark.parametrize("gate", [0, 1])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("normed", ["no", "plain", "affine"])
def test_the_operator_hands_everything_to_the_kernel(gate: int, biased: bool, normed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: None, raising=False)
    monkeypatch.setattr(gated_linear, "_gated_linear", lambda shapes, mode, norm, *key: Emulated(norm))
    torch.manual_seed(0)
    both = FusedFactors(tuple(torch.randn(pattern.factor_shape) for pattern in WIDE), torch.randn(WIDE.out_features) if biased else None)
    norm = {"no": None, "plain": Norm(None, None, 0.1), "affine": Norm(torch.randn(64), torch.randn(64), 0.1)}[normed]
    x, identity = torch.randn(128, 64), torch.eye(32)[None, :, :, None]
    parts = (None, None, None) if norm is None else (norm.weight, norm.bias, norm.eps)
    with recording() as met:
        y = run_gated_linear(x, *parts, list(both.factors), both.bias, gate, "silu", "fp32")
    assert [rows for _, rows in met] == [128]
    exact = Gated((FusedFactors(tuple(factor.double() for factor in both.factors), in_double(both.bias)),), gate)
    exact_norm = None if norm is None else Norm(in_double(norm.weight), in_double(norm.bias), norm.eps)
    truth = composed.ffn(x.double(), exact_norm, exact, FusedFactors((identity.double(),)), "silu", None, False)
    assert_epilogue_comparable(y, composed.ffn(x, norm, Gated((both,), gate), FusedFactors((identity,)), "silu", None, False), truth, FP32)


def test_layers_whose_halves_are_no_products_by_themselves_have_the_reason() -> None:
    for b, linears in ((31, 1), (32, 2)):
        architecture = Architecture.of((1, b, 16, 2), (2, 16, 32, 1))
        assert "halves of one layer's outputs" in str(tiling(architecture, "fp16", linears, gated=True))
