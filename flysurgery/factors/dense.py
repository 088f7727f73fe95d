"""Between Kronecker-sparse factors and dense matrices, exactly."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flysurgery.errors import PatternError
from flysurgery.factors.storage import architecture_of, ks_einsum, pattern_of
from flysurgery.patterns import Pattern


def factor_to_dense(
    factor: Tensor,  # shape: (a, b, c, d)
) -> Tensor:  # shape: (a*b*d, a*c*d)
    """Write out the matrix K of a factor, zeros included.

    ``K[(i*b + p)*d + j, (i*c + q)*d + j] = factor[i, p, q, j]``. Exact in every dtype, and differentiable.
    """
    pattern = pattern_of(factor)
    by_residue = torch.diag_embed(factor.permute(1, 2, 0, 3))  # shape: (b, c, a, d, d)
    by_block = torch.diag_embed(by_residue.permute(0, 1, 3, 4, 2))  # shape: (b, c, d, d, a, a)
    return by_block.permute(4, 0, 2, 5, 1, 3).reshape(pattern.shape)


def dense_to_factor(
    matrix: Tensor,  # shape: (a*b*d, a*c*d)
    pattern: Pattern,
) -> Tensor:  # shape: (a, b, c, d), contiguous, a fresh tensor
    """Gather the entries on the support of ``pattern``; entries off the support are left out.

    The inverse of ``factor_to_dense``: exact, no arithmetic.

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
