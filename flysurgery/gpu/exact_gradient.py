"""The gradients of the mode ``exact`` in float64, by PyTorch: there is no kernel for its factors' gradients."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flysurgery.factors import ks_einsum


def exact_gradients(dy: Tensor, x: Tensor, factors: Sequence[Tensor], linears: int, with_input: bool, with_bias: bool) -> list[Tensor]:
    """As ``Chain.run``, in float32 or a wider dtype of x."""
    dtype, length = torch.promote_types(x.dtype, torch.float32), len(factors) // linears
    of_input = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    of_factors: list[list[Tensor]] = [[] for _ in range(length)]
    for linear, part in enumerate(dy.chunk(linears, dim=-1)):
        own = [factor.double() for factor in factors[linear * length : (linear + 1) * length]]
        inputs, gradient = [x.double()], part.double()
        for factor in own[:0:-1]:
            inputs.append(ks_einsum(inputs[-1], factor))
        for found, factor in zip(of_factors, own, strict=True):
            a, b, c, d = factor.shape
            left, right = gradient.reshape(-1, a, b, d), inputs.pop().reshape(-1, a, c, d)
            found.append(torch.einsum("ripj,riqj->ipqj", left, right).to(dtype))
            gradient = ks_einsum(gradient, factor.transpose(1, 2))
        of_input += gradient
    biases = [dy.reshape(-1, dy.shape[-1]).sum(0, dtype=dtype)] if with_bias else []
    return [*map(torch.cat, of_factors), *biases, *([of_input.to(x.dtype)] if with_input else [])]
