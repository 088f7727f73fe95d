"""Products of two factors that are near a matrix in what they do to given inputs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flysurgery.factors import factors_to_dense
from flysurgery.patterns import Architecture
from flysurgery.projection.grid import Grid
from flysurgery.projection.truncated_svd import truncated_svd
from flysurgery.projection.two_factor import two_factor

SWEEPS = 10
ROUNDING = 1e-9
"""By so much, relative to ``tr(W G Wᵀ)``, may an error seem to rise in float64."""
RIDGE = 1e-13
"""Added to a singular system of the left factor, relative to its trace; the step is not taken where it does not help."""


def block_cycling(
    matrix: Tensor,  # shape: (out_features, in_features), float64
    architecture: Architecture,
    gram: Tensor,  # shape: (in_features, in_features), float64, positive definite
    *,
    sweeps: int = SWEEPS,
    enough: float = 1e-3,
) -> tuple[tuple[Tensor, Tensor], tuple[float, ...]]:  # factors of shapes (a1, b1, c1, d1), (a2, b2, c2, d2)
    """Find ``K_1 K_2`` with a small ``tr(D G Dᵀ)`` for ``D = W - K_1 K_2``, and give the relative errors, first that of the start.

    A relative error is ``sqrt(tr(D G Dᵀ) / tr(W G Wᵀ))``. The rows of different row classes don't meet, so all row classes are worked on
    at once. With all column classes but one fixed, the best block of that one is a reduced-rank regression: for ``G_ii = L Lᵀ`` and the
    residual R of the others, the truncated SVD of ``R G[:, i] L⁻ᵀ``, times ``L⁻¹``. A sweep first solves for the whole left factor, the
    right one fixed, and then goes through the column classes; each step is a minimum in what it moves, so the error never rises. It
    starts from the better of the plain projection and the one that leaves out what G says between column classes. It stops after
    ``sweeps`` sweeps, or when a sweep lowers the error by less than the share ``enough``. The result is no global minimum.

    Costs ``8*m*n²`` flops a sweep and one eigenproblem of size ``min(b1, c2)`` a block.

    Source: Izenman 1975, "Reduced-rank regression for the multivariate linear model", for one block.
    """
    cycle = _Cycle(matrix, architecture, gram)
    errors = [cycle.error()]
    for _ in range(sweeps):
        cycle.solve_left_factor()
        cycle.visit_column_classes()
        errors.append(cycle.error())
        assert errors[-1] ** 2 <= errors[-2] ** 2 + ROUNDING, f"a sweep raised the error from {errors[-2]} to {errors[-1]}"
        if errors[-1] >= (1 - enough) * errors[-2]:
            break
    return two_factor(cycle.grid.scatter(cycle.state.product), architecture), tuple(errors)


@dataclass(frozen=True)
class _State:
    """``right`` holds the rows of K_2 that each row class meets, zeros where a class has fewer; ``product`` is K_1 K_2."""

    product: Tensor  # shape: (row classes, b1, n)
    right: Tensor  # shape: (row classes, column classes * largest rank, n)


class _Cycle:
    """Everything with the columns sorted by their class."""

    def __init__(self, matrix: Tensor, architecture: Architecture, gram: Tensor) -> None:
        self.grid = Grid(architecture)
        self.weight = self.grid.gather(matrix)
        columns = self.grid.columns().to(gram.device)
        self.gram = gram[columns][:, columns]
        self.size = architecture.patterns[1].c
        ranks = self.grid.ranks().to(gram.device)
        self.largest_rank = int(ranks.max())
        self.is_kept = torch.arange(self.largest_rank, device=gram.device) < ranks[..., None]  # (row classes, column classes, rank)
        blocks = torch.stack([self.gram[part, part] for part in self._parts()])
        self.roots = torch.linalg.cholesky(blocks)
        self.whole = float((self.weight @ self.gram * self.weight).sum())
        self.state = self._start(matrix, architecture)

    def error(self) -> float:
        return self._squared(self._residual(self.state.product)) ** 0.5

    def solve_left_factor(self) -> None:
        right = self.state.right
        weighted = right @ self.gram
        system = weighted @ right.mT
        diagonal = system.diagonal(dim1=1, dim2=2)
        ridge = RIDGE * diagonal.mean(dim=1, keepdim=True) + (diagonal == 0)
        factor, failed = torch.linalg.cholesky_ex(system + torch.diag_embed(ridge))
        if failed.any():
            return
        left = torch.cholesky_solve(weighted @ self.weight.mT, factor).mT
        product = left @ right
        if self._squared(self._residual(product)) <= self._squared(self._residual(self.state.product)):
            self.state = _State(product, right)

    def visit_column_classes(self) -> None:
        product, right = self.state.product.clone(), self.state.right.clone()
        pull = self._residual(product) @ self.gram  # shape: (row classes, b1, n)
        for index, part in enumerate(self._parts()):
            before = product[:, :, part]
            wanted = pull[:, :, part] + before @ self.gram[part, part]
            after, rows = self._best_block(torch.linalg.solve_triangular(self.roots[index].mT, wanted, upper=True, left=False), index)
            pull -= (after - before) @ self.gram[part]
            product[:, :, part] = after
            right[:, self._inner(index), part] = rows
        self.state = _State(product, right)

    def _start(self, matrix: Tensor, architecture: Architecture) -> _State:
        plain = self.grid.gather(factors_to_dense(two_factor(matrix, architecture)))
        candidates = (self._from_blocks(self.weight), self._from_blocks(plain))
        return min(candidates, key=lambda state: self._squared(self._residual(state.product)))

    def _from_blocks(self, matrix: Tensor) -> _State:
        """Each block of ``matrix`` for itself, in its own part of the metric."""
        product = torch.zeros_like(matrix)
        right = matrix.new_zeros(len(matrix), self.grid.column_classes * self.largest_rank, matrix.shape[-1])
        for index, part in enumerate(self._parts()):
            product[:, :, part], right[:, self._inner(index), part] = self._best_block(matrix[:, :, part] @ self.roots[index], index)
        return _State(product, right)

    def _best_block(self, whitened: Tensor, index: int) -> tuple[Tensor, Tensor]:
        """The nearest block of its rank to ``whitened L⁻¹``, and its rows of K_2."""
        U, S, Vh = truncated_svd(whitened, self.largest_rank)
        kept = self.is_kept[:, index].to(whitened)
        rows = torch.linalg.solve_triangular(self.roots[index], Vh * kept[..., None], upper=False, left=False)
        return (U * (S * kept)[:, None]) @ rows, rows

    def _residual(self, product: Tensor) -> Tensor:
        return self.weight - product

    def _squared(self, residual: Tensor) -> float:
        return max(float((residual @ self.gram * residual).sum()), 0.0) / (self.whole or 1.0)

    def _parts(self) -> list[slice]:
        return [slice(start, start + self.size) for start in range(0, len(self.gram), self.size)]

    def _inner(self, index: int) -> slice:
        return slice(index * self.largest_rank, (index + 1) * self.largest_rank)
