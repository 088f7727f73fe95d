"""The truth: products in float64, by the formula over index sets, with nothing taken from the package."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import gelu, silu

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda v: v,
    "gelu": gelu,
    "gelu_tanh": lambda v: gelu(v, approximate="tanh"),
    "silu": silu,
}
"""What the epilogues of the kernels apply, by name."""


def product(x: Tensor, factors: Sequence[Tensor], bias: Tensor | None = None) -> Tensor:  # shape: (rows, out_features), float64
    """``x @ (K_1 ... K_L).T + bias`` with stored inputs widened to float64."""
    values = x.double()
    for factor in reversed(factors):
        values = _one(values, factor.double())
    return values if bias is None else values + bias.double()


def absolute_product(x: Tensor, factor: Tensor) -> Tensor:
    """``|x| @ |K|.T``: the size of what is summed, which scales every rounding error."""
    return _one(x.double().abs(), factor.double().abs())


def dense(factor: Tensor) -> Tensor:  # shapes: (a, b, c, d) -> (a*b*d, a*c*d)
    """The matrix of a factor, entry by entry: ``K[(i*b + p)*d + j, (i*c + q)*d + j] = factor[i, p, q, j]``."""
    a, b, c, d = factor.shape
    i, p, q, j = torch.meshgrid(*(torch.arange(size, device=factor.device) for size in (a, b, c, d)), indexing="ij")
    matrix = factor.new_zeros(a * b * d, a * c * d)
    matrix[(i * b + p) * d + j, (i * c + q) * d + j] = factor
    return matrix


def _one(x: Tensor, factor: Tensor) -> Tensor:
    # Gonon et al. 2024, arXiv:2405.15013, Algorithm 1: one small product for each pair (i, j) of index sets
    a, b, c, d = factor.shape
    out = x.new_zeros(x.shape[0], a * b * d)
    for i in range(a):
        for j in range(d):
            columns = (i * c + torch.arange(c, device=x.device)) * d + j
            rows = (i * b + torch.arange(b, device=x.device)) * d + j
            out[:, rows] = x[:, columns] @ factor[i, :, :, j].mT
    return out
