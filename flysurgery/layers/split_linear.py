"""A fused projection taken apart, such as qkv into q, k and v."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from flysurgery.errors import PatternError
from flysurgery.layers.butterfly_linear import ButterflyLinear
from flysurgery.ops import ks_linear_group


class SplitLinear(nn.Module):
    """Linear layers side by side: the same x goes to each part, and the outputs are joined on the last dimension.

    The parts become children under their names, in order, so the parameters of part "q" are called ``q.factors.0`` or
    ``q.weight``, and so on. There is no ``weight``, for the reason given at ``ButterflyLinear``.

    Shapes: input ``(*batch, in_features)``, output ``(*batch, out_features)``, a fresh tensor.

    Raises:
        PatternError: there is no part, or two parts take different numbers of features; the message gives both.
    """

    def __init__(self, parts: Mapping[str, ButterflyLinear | nn.Linear]) -> None:
        super().__init__()
        if not parts:
            raise PatternError("a SplitLinear needs at least one part, got none")
        (first, head), *rest = parts.items()
        for name, part in rest:
            if part.in_features != head.in_features:
                raise PatternError(
                    f"the parts of a SplitLinear must take the same features: '{first}' takes {head.in_features}, "
                    f"'{name}' takes {part.in_features}"
                )
        self.in_features = head.in_features
        self.out_features = sum(part.out_features for part in parts.values())
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(
        self,
        x: Tensor,  # shape: (*batch, in_features)
    ) -> Tensor:  # shape: (*batch, out_features)
        parts = list(self.children())
        factored = [part for part in parts if isinstance(part, ButterflyLinear)]
        if len(factored) == len(parts) and len({part.backend for part in factored}) == 1:
            factors, biases = [tuple(part.factors) for part in factored], [part.bias for part in factored]
            return ks_linear_group(x, factors, biases, backend=factored[0].backend)
        return torch.cat([part(x) for part in parts], dim=-1)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}"
