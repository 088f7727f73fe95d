"""Operations with fused gradients, one of each form, with tensors that require gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flysurgery.ops import Dense, FeedForward, FusedFactors, LinearResidual, Norm, NormLinears
from flysurgery.patterns import named


class Made:
    """Tensors of one device, normal, in float64 unless they are cast."""

    def __init__(self, device: str = "cpu", width: int = 24) -> None:
        self.device, self.width, self.hidden = device, width, 4 * width
        self._generator = torch.Generator().manual_seed(0)

    def tensor(self, *shape: int) -> Tensor:
        drawn = torch.randn(shape, generator=self._generator, dtype=torch.float64)
        fan_in = shape[-1] if len(shape) == 2 else shape[2] if len(shape) == 4 else 1
        return (drawn / fan_in**0.5).to(self.device).requires_grad_()

    def dense(self, outputs: int, inputs: int) -> Dense:
        return Dense(self.tensor(outputs, inputs), self.tensor(outputs))

    def factors(self, outputs: int, inputs: int, arch: str = "monarch") -> FusedFactors:
        return FusedFactors(tuple(self.tensor(*p.factor_shape) for p in named(arch, outputs, inputs)), self.tensor(outputs))

    def norm(self) -> Norm:
        return Norm(self.tensor(self.width), self.tensor(self.width), 1e-6)


def _projection(make: Made, *group: Any) -> NormLinears:
    return NormLinears(make.norm(), group)


OPERATIONS: dict[str, Callable[[Made, int], Any]] = {
    "dense q, k, v": lambda m, rows: _projection(m, m.dense(3 * m.width, m.width)),
    "factors side by side": lambda m, rows: _projection(m, *(m.factors(m.width, m.width, "gonon") for _ in range(3))),
    "factors beside dense": lambda m, rows: _projection(m, m.factors(m.width, m.width), m.dense(m.width, m.width)._replace(bias=None)),
    "norm without weights": lambda m, rows: NormLinears(Norm(None, None, 1e-5), (m.dense(m.width, m.width),)),
    "residual": lambda m, rows: LinearResidual(m.dense(m.width, m.width), m.tensor(rows, m.width)),
    "scaled residual": lambda m, rows: LinearResidual(m.factors(m.width, m.width), m.tensor(rows, m.width), m.tensor(m.width)),
    "dense feed-forward": lambda m, rows: FeedForward(
        m.norm(), m.dense(m.hidden, m.width), m.dense(m.width, m.hidden), "gelu", m.tensor(m.width)
    ),
    "feed-forward of factors": lambda m, rows: FeedForward(m.norm(), m.factors(m.hidden, m.width), m.factors(m.width, m.hidden), "silu"),
    "feed-forward alone": lambda m, rows: FeedForward(
        None, m.factors(m.hidden, m.width), m.dense(m.width, m.hidden), "gelu_tanh", residual=False
    ),
}
