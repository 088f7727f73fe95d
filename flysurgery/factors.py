"""The canonical storage of a Kronecker-sparse factor, its blocks and its matrix, and the definition of its product."""

from collections.abc import Iterable, Sequence
from functools import cache
from operator import index

import torch
from torch import Tensor

from flysurgery.errors import PatternError
from flysurgery.patterns import Architecture, Pattern

__all__ = ["bit_reversal", "factors_to_dense", "ks_einsum"]


def pattern_of(factor: Tensor) -> Pattern:  # shape: (a, b, c, d)
    """The pattern of a factor, read off its shape; errors are those of ``architecture_of``."""
    return architecture_of((factor,)).patterns[0]


def architecture_of(factors: Iterable[Tensor]) -> Architecture:  # shapes: (a, b, c, d), left to right as in W = K_1 K_2
    """The architecture of a product, read off its factors' shapes.

    Raises:
        PatternError: there is no factor, one has not four dimensions or an empty one, or two neighbours disagree about their sizes.
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


def to_blocks(factor: Tensor) -> Tensor:  # shapes: (a, b, c, d) -> (a*d, b, c), contiguous
    """The dense blocks of a factor: ``blocks[i*d + j, p, q] = factor[i, p, q, j]``. A view where d = 1, else a copy."""
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


def factor_to_dense(factor: Tensor) -> Tensor:  # shapes: (a, b, c, d) -> (a*b*d, a*c*d)
    """The matrix K of a factor, zeros included: ``K[(i*b + p)*d + j, (i*c + q)*d + j] = factor[i, p, q, j]``.

    Exact in every dtype, and differentiable.
    """
    pattern = pattern_of(factor)
    by_residue = torch.diag_embed(factor.permute(1, 2, 0, 3))  # shape: (b, c, a, d, d)
    by_block = torch.diag_embed(by_residue.permute(0, 1, 3, 4, 2))  # shape: (b, c, d, d, a, a)
    return by_block.permute(4, 0, 2, 5, 1, 3).reshape(pattern.shape)


def dense_to_factor(
    matrix: Tensor,  # shape: (a*b*d, a*c*d)
    pattern: Pattern,
) -> Tensor:  # shape: (a, b, c, d), contiguous, a fresh tensor
    """The entries on the support of ``pattern``, the inverse of ``factor_to_dense``; those off the support are left out.

    Raises:
        PatternError: ``matrix`` has not the pattern's shape; the message gives both.
    """
    if tuple(matrix.shape) != pattern.shape:
        raise PatternError(f"pattern {pattern} describes a matrix of shape {pattern.shape}, got {tuple(matrix.shape)}")
    a, b, c, d = pattern.factor_shape
    blocks = matrix.reshape(a, b, d, a, c, d).diagonal(dim1=0, dim2=3)  # shape: (b, d, c, d, a)
    return blocks.diagonal(dim1=1, dim2=3).permute(2, 0, 1, 3).clone(memory_format=torch.contiguous_format)


def factors_to_dense(
    factors: Sequence[Tensor],  # shapes: (a, b, c, d), left to right as in W = K_1 K_2
) -> Tensor:  # shape: (out_features, in_features)
    """Multiply the factors out: ``W = K_1 K_2 ... K_L``.

    Half-precision factors are multiplied in float32 and the product is rounded once. Costs ``2 * in_features``
    flops for each nonzero of K_1 to K_{L-1}. Differentiable.

    Raises:
        PatternError: the shapes do not chain.
    """
    architecture_of(factors)
    dtype = factors[-1].dtype
    wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    product = factor_to_dense(factors[-1].to(wide))
    for factor in reversed(factors[:-1]):
        product = ks_einsum(product.mT, factor.to(wide)).mT
    return product.to(dtype).contiguous()


def bit_reversal(n: int) -> Tensor:  # shape: (n,), int64, on the CPU
    """Order 0 to n-1 by their binary digits read backwards: ``bit_reversal(8)`` is 0, 4, 2, 6, 1, 5, 3, 7.

    The order is its own inverse. The columns of a discrete Fourier transform in this order are exactly a square dyadic butterfly:
    ``factors = project(dft[:, order], square_dyadic(n)).factors`` gives ``ks_linear(x[..., order], factors) == x @ dft.T``.

    Raises:
        PatternError: n is no power of two.

    Source: Cooley and Tukey 1965; Dao et al. 2019, arXiv:1903.05895.
    """
    if n < 1 or n & (n - 1):
        raise PatternError(f"bit reversal needs a power of two, got {n}")
    order = torch.zeros(1, dtype=torch.int64)
    while len(order) < n:
        order = torch.cat((2 * order, 2 * order + 1))
    return order
