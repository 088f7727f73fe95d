"""The best product of two factors by other means: numpy SVDs over equal supports."""

from functools import reduce

import numpy as np
import torch
from torch import Tensor

from flysurgery.patterns import Architecture
from tests.patterns.brute_force import blocks
from tests.support.oracle import dense

EXACT = 1e-10
"""A matrix that is a product of the architecture must be recovered to this relative error in float64."""


def dense_factor(factor: Tensor) -> np.ndarray:
    """K in float64, or in complex128."""
    return dense(factor.detach().cpu().to(torch.promote_types(factor.dtype, torch.float64))).numpy()


def dense_product(factors: tuple[Tensor, ...]) -> np.ndarray:
    """``K_1 K_2 ... K_L`` in float64, or in complex128."""
    return reduce(np.matmul, map(dense_factor, factors))


def random_matrix(architecture: Architecture, seed: int = 0) -> Tensor:
    """A standard normal matrix of the architecture's shape, in float64."""
    return torch.randn(architecture.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def random_product(architecture: Architecture, seed: int = 0) -> Tensor:
    """The product of standard normal factors, in float64."""
    generator = torch.Generator().manual_seed(seed)
    factors = tuple(torch.randn(pattern.factor_shape, generator=generator, dtype=torch.float64) for pattern in architecture)
    return torch.from_numpy(dense_product(factors))


def random_gram(n: int, seed: int = 0, decay: float = 1.0) -> Tensor:
    """A covariance of full rank whose eigenvalues fall as ``1 / k**(2*decay)``, in a random basis."""
    generator = torch.Generator().manual_seed(seed)
    basis = torch.linalg.qr(torch.randn(n, n, generator=generator, dtype=torch.float64))[0]
    values = torch.arange(1, n + 1, dtype=torch.float64) ** (-2 * decay)
    return (basis * values) @ basis.mT


def error_of(matrix: Tensor, product: np.ndarray, gram: Tensor) -> float:
    """The relative error ``sqrt(tr(D G Dᵀ) / tr(W G Wᵀ))``."""
    residual, whole = matrix.numpy() - product, matrix.numpy()
    return float(np.sqrt(np.trace(residual @ gram.numpy() @ residual.T) / np.trace(whole @ gram.numpy() @ whole.T)))


def best_error(matrix: Tensor, architecture: Architecture) -> float:
    """The smallest Frobenius error that two factors can reach: the tails of the singular values of all blocks."""
    dense = matrix.to(torch.promote_types(matrix.dtype, torch.float64)).numpy()
    tails = [np.linalg.svd(dense[np.ix_(rows, columns)], compute_uv=False)[rank:] for rows, columns, rank in blocks(architecture)]
    return float(np.linalg.norm(np.concatenate(tails)))
