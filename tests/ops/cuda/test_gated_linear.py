"""A gate and a value in one launch: how a layer's outputs are halved, and what the operator hands to the kernel."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from flysurgery.ops import FusedFactors, Gated, Norm, composed
from flysurgery.ops.cuda import gated_linear
from flysurgery.ops.cuda.gated_linear import half_architecture, run_gated_linear
from flysurgery.ops.cuda.met import recording
from flysurgery.patterns import Architecture
from tests.support.tolerance import FP32, assert_epilogue_comparable

WIDE = Architecture.of((1, 32, 16, 2), (2, 16, 32, 1))


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape)


class Emulated:
    """The kernel by its definition; its image is the factors, the gate's first."""

    kernel: Emulated

    def __init__(self, norm: bool) -> None:
        self.kernel, self.norm = self, norm
        self.pairs: list[Sequence[Tensor]] = []

    def pack(self, linears: Sequence[Sequence[Tensor]]) -> Tensor:
        self.pairs = [tuple(factor.float() for factor in pair) for pair in linears]
        return torch.zeros(1)

    def run(self, x: Tensor, image: Tensor, bias: Tensor | None, residual: None, activation: str, eps: float) -> Tensor:
        x = torch.nn.functional.layer_norm(x, x.shape[-1:], eps=eps) if self.norm else x
        parts = [composed.linear_residual(x, FusedFactors(tuple(pair)), torch.zeros(())) for pair in self.pairs]
        gate, value = parts if bias is None else [part + own for part, own in zip(parts, bias.chunk(2), strict=True)]
        return composed.ACTIVATIONS[activation](gate) * value


@pytest.mark.parametrize("gate", [0, 1])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("normed", ["no", "plain", "affine"])
def test_the_operator_hands_everything_to_the_kernel(
    gate: int, packed: bool, biased: bool, normed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)
    monkeypatch.setattr(gated_linear, "_gated_linears", lambda shapes, linears, mode, norm, *key: Emulated(norm))
    torch.manual_seed(0)
    members = [
        FusedFactors(tuple(drawn(*pattern.factor_shape) for pattern in WIDE), drawn(WIDE.out_features) if biased else None)
        for _ in range(1 if packed else 2)
    ]
    norm = {"no": None, "plain": Norm(None, None, 0.1), "affine": Norm(drawn(64), drawn(64), 0.1)}[normed]
    x, up = drawn(128, 64), Gated(tuple(members), gate)
    parts = (None, None, None) if norm is None else (norm.weight, norm.bias, norm.eps)
    factors, biases = [factor for member in members for factor in member.factors], [m.bias for m in members if m.bias is not None]
    with recording() as met:
        y = run_gated_linear(x, *parts, factors, biases, gate, "silu", "fp32")
    assert [rows for _, rows in met] == [128]
    identity = FusedFactors((torch.eye(y.shape[1])[None, :, :, None],))
    exact = Gated(
        tuple(FusedFactors(tuple(f.double() for f in m.factors), None if m.bias is None else m.bias.double()) for m in members), gate
    )
    exact_norm = None if norm is None else Norm(*((None if p is None else p.double()) for p in (norm.weight, norm.bias)), norm.eps)
    truth = composed.ffn(x.double(), exact_norm, exact, FusedFactors((identity.factors[0].double(),)), "silu", None, False)
    assert_epilogue_comparable(y, composed.ffn(x, norm, up, identity, "silu", None, False), truth, FP32)


def test_which_layers_have_products_as_halves() -> None:
    assert half_architecture([(1, 32, 16, 2), (2, 16, 32, 1)]) == Architecture.of((1, 16, 16, 2), (2, 16, 32, 1))
    for left in ((1, 31, 16, 2), (2, 32, 8, 2)):
        assert "products by themselves" in str(half_architecture([left, (2, 16, 32, 1)]))
