"""The best products of low rank in what they do to given inputs, of several ranks at once."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter

import torch
from torch import Tensor

from flysurgery.projection.block_cycling import Fitted
from flysurgery.projection.truncated_svd import truncated_product


def low_ranks(
    matrix: Tensor,  # shape: (out_features, in_features), float64
    ranks: Sequence[int],
    gram: Tensor,  # shape: (in_features, in_features), float64, positive definite
) -> list[Fitted]:
    """Find for each rank the product that makes ``tr(D G Dᵀ)`` least, which is a reduced-rank regression.

    For ``G = L Lᵀ`` it is the truncated SVD of ``W L``, times ``L⁻¹``. All ranks take their leading triples from one eigenproblem of size
    ``min(out_features, in_features)``.

    Source: Izenman 1975, "Reduced-rank regression for the multivariate linear model".
    """
    started = perf_counter()
    root, pull = torch.linalg.cholesky(gram), matrix @ gram
    left, whitened = (each[0] for each in truncated_product((matrix @ root)[None], min(max(ranks), *matrix.shape)))
    right = torch.linalg.solve_triangular(root, whitened, upper=False, left=False)
    spread = right @ gram
    whole = (matrix * pull).sum()
    products = [left[:, :rank] @ right[:rank] for rank in ranks]
    squared = [
        ((matrix - product) * (pull - left[:, :rank] @ spread[:rank])).sum().clamp_min(0) / whole.where(whole > 0, 1.0)
        for rank, product in zip(ranks, products, strict=True)
    ]
    errors = torch.stack(squared).sqrt().tolist()
    seconds = (perf_counter() - started) / len(ranks)
    return [Fitted(product, (error,), seconds) for product, error in zip(products, errors, strict=True)]
