"""The block layout: a factor as ``a*d`` dense blocks, one for each pair (i, j)."""

from __future__ import annotations

from torch import Tensor

from flysurgery.errors import PatternError
from flysurgery.factors.storage import pattern_of
from flysurgery.patterns import Pattern


def to_blocks(
    factor: Tensor,  # shape: (a, b, c, d)
) -> Tensor:  # shape: (a*d, b, c), contiguous
    """Give the dense blocks of a factor: ``blocks[i*d + j, p, q] = factor[i, p, q, j]``.

    A view where the storage allows it (d = 1), else a copy.

    Raises:
        PatternError: ``factor`` has not four dimensions.
    """
    pattern = pattern_of(factor)
    return factor.permute(0, 3, 1, 2).reshape(pattern.a * pattern.d, pattern.b, pattern.c).contiguous()


def from_blocks(
    blocks: Tensor,  # shape: (a*d, b, c)
    pattern: Pattern,
) -> Tensor:  # shape: (a, b, c, d), contiguous
    """Give the canonical storage back: the inverse of ``to_blocks``, and a view where that is one.

    Raises:
        PatternError: ``blocks`` has not the shape ``(a*d, b, c)``; the message gives both shapes.
    """
    expected = (pattern.a * pattern.d, pattern.b, pattern.c)
    if tuple(blocks.shape) != expected:
        raise PatternError(f"the blocks of pattern {pattern} have shape {expected}, got {tuple(blocks.shape)}")
    return blocks.reshape(pattern.a, pattern.d, pattern.b, pattern.c).permute(0, 2, 3, 1).contiguous()
