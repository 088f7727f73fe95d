"""What a factor is: a tensor of shape (a, b, c, d) holds one of that pattern, ``to_blocks`` gives its blocks, ``ks_einsum`` its product."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from operator import index

import torch
from torch import Tensor

from flysurgery.errors import PatternError
from flysurgery.patterns import Architecture, Pattern


def pattern_of(
    factor: Tensor,  # shape: (a, b, c, d)
) -> Pattern:
    """Read the pattern of a factor off its shape.

    Raises:
        PatternError: ``factor`` has not four dimensions, or one of them is zero.
    """
    return architecture_of((factor,)).patterns[0]


def architecture_of(
    factors: Iterable[Tensor],  # shapes: (a, b, c, d), left to right as in W = K_1 K_2
) -> Architecture:
    """Read the architecture of a product off its factors' shapes.

    Raises:
        PatternError: there is no factor, one has not four dimensions, or two neighbours disagree about the
            size between them.
    """
    shapes = tuple(tuple(map(index, factor.shape)) for factor in factors)  # who traces may give tensors or symbols as sizes
    if torch.compiler.is_compiling():  # what is noted while a graph is made has it made again at the next call
        return _read.__wrapped__(shapes)
    return _read(shapes)


@cache  # a layer asks for the same one at every call
def _read(shapes: tuple[tuple[int, ...], ...]) -> Architecture:
    for shape in shapes:
        if len(shape) != 4:
            raise PatternError(f"a factor is stored as (a, b, c, d), four dimensions; got a tensor of shape {shape}")
    return Architecture(tuple(Pattern(*shape) for shape in shapes))


def to_blocks(
    factor: Tensor,  # shape: (a, b, c, d)
) -> Tensor:  # shape: (a*d, b, c), contiguous
    """Give the dense blocks of a factor: ``blocks[i*d + j, p, q] = factor[i, p, q, j]``. A view where d = 1, else a copy.

    Raises:
        PatternError: ``factor`` has not four dimensions.
    """
    pattern = pattern_of(factor)
    return factor.permute(0, 3, 1, 2).reshape(pattern.a * pattern.d, pattern.b, pattern.c).contiguous()


def ks_einsum(
    x: Tensor,  # shape: (*batch, a*c*d)
    factor: Tensor,  # shape: (a, b, c, d)
) -> Tensor:  # shape: (*batch, a*b*d), a fresh tensor
    """Multiply the rows of ``x`` by a Kronecker-sparse factor: ``x @ K.T``.

    ``y[i, p, j] = sum over q of x[i, q, j] * factor[i, p, q, j]`` with rows of x seen as ``(a, c, d)`` and rows of y as
    ``(a, b, d)``. Costs ``2*a*b*c*d`` flops per row. Any floating or complex dtype, any device, and gradients of any order.

    Raises:
        PatternError: ``x.shape[-1] != a*c*d``; the message gives both numbers.

    Source: Gonon et al. 2024, arXiv:2405.15013, Algorithm 1.
    """
    pattern = pattern_of(factor)
    if x.dim() == 0 or x.shape[-1] != pattern.in_features:
        raise PatternError(f"a factor of pattern {pattern} takes rows of {pattern.in_features} features, got x of shape {tuple(x.shape)}")
    rows = x.reshape(*x.shape[:-1], pattern.a, pattern.c, pattern.d)  # unflatten is Python, which PyTorch 2.11 does not export everywhere
    return torch.einsum("...iqj,ipqj->...ipj", rows, factor).flatten(-3)
