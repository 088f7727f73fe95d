"""The gradient of one factor in float64, by PyTorch, for the mode ``exact``, which has no kernel of its own."""

from __future__ import annotations

import torch
from torch import Tensor

from flysurgery.patterns import Pattern


class ExactGradient:
    """Stands in for ``FactorGrad``."""

    def __init__(self, pattern: Pattern) -> None:
        self.pattern = pattern

    def run(self, x: Tensor, dy: Tensor, linears: int = 1, with_bias: bool = False) -> list[Tensor]:
        """As ``FactorGrad.run``, in float32 or the wider dtype of x."""
        a, b, c, d = self.pattern.factor_shape
        x, dy, dtype = x.flatten(0, -2), dy.flatten(0, -2), torch.promote_types(x.dtype, torch.float32)
        found = []
        for index, part in enumerate(dy.chunk(linears, dim=1)):
            own = x if x.shape[1] == self.pattern.in_features else x.chunk(linears, dim=1)[index]
            left = part.double().unflatten(1, (a, b, d)).permute(1, 3, 2, 0).flatten(0, 1)  # shape: (a*d, b, rows)
            right = own.double().unflatten(1, (a, c, d)).permute(1, 3, 0, 2).flatten(0, 1)  # shape: (a*d, rows, c)
            found.append(torch.bmm(left, right).unflatten(0, (a, d)).permute(0, 2, 3, 1).to(dtype))
        return [torch.cat(found), *([dy.sum(0, dtype=dtype)] if with_bias else [])]
