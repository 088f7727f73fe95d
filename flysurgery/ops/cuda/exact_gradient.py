"""The gradient of one factor in float64, by PyTorch, for the mode ``exact``, which has no kernel of its own."""

from __future__ import annotations

import torch
from torch import Tensor

from flysurgery.patterns import Pattern


class ExactGradient:
    """Stands in for ``FactorGrad``."""

    sums_dy = False

    def __init__(self, pattern: Pattern) -> None:
        self.pattern = pattern

    def write(self, x: Tensor, dy: Tensor, out: Tensor, start: int, bias_start: int | None = None, linears: int = 1) -> None:
        """As ``FactorGrad.write``, without the sums of dy."""
        a, b, c, d = self.pattern.factor_shape
        x, dy = x.flatten(0, -2), dy.flatten(0, -2)
        shared = x.shape[1] == self.pattern.in_features
        for index, part in enumerate(dy.chunk(linears, dim=1)):
            own = x if shared else x.chunk(linears, dim=1)[index]
            left = part.double().unflatten(1, (a, b, d)).permute(1, 3, 2, 0).flatten(0, 1)  # shape: (a*d, b, rows)
            right = own.double().unflatten(1, (a, c, d)).permute(1, 3, 0, 2).flatten(0, 1)  # shape: (a*d, rows, c)
            gradient = torch.bmm(left, right).unflatten(0, (a, d)).permute(0, 2, 3, 1)
            begin = start + index * self.pattern.nnz
            out[begin : begin + self.pattern.nnz].view(a, b, c, d).copy_(gradient)
