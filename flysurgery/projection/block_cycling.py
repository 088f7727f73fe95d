"""Products of two factors that are near a matrix in what they do to given inputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from time import perf_counter
from types import EllipsisType

import torch
from torch import Tensor

from flysurgery.patterns import Architecture
from flysurgery.projection.grid import Grid
from flysurgery.projection.truncated_svd import truncated_product

SWEEPS = 10
ENOUGH = 1e-3
ROUNDING = 1e-9
"""By so much, relative to ``tr(W G Wᵀ)``, may an error seem to rise in float64."""
RIDGE = 1e-13
"""Added to a singular system of the left factor, relative to its trace; the step is not taken where it does not help."""


@dataclass(frozen=True)
class Fitted:
    """One product.

    Attributes:
        product: ``K_1 K_2``, shape (out_features, in_features), float64.
        errors: relative errors, first that of the start and then one a sweep, never rising.
        seconds: wall time; of matrices that were worked on together an equal share.
    """

    product: Tensor
    errors: tuple[float, ...]
    seconds: float


def cycle_together(
    matrices: Sequence[Tensor],  # each of shape (out_features, in_features), float64
    architecture: Architecture,
    grams: Sequence[Tensor],  # one a matrix, shape (in_features, in_features), float64, positive definite
    *,
    sweeps: int = SWEEPS,
    enough: float = ENOUGH,
) -> list[Fitted]:
    """Find for each matrix W with its G a product ``K_1 K_2`` that makes ``tr(D G Dᵀ)`` small, with ``D = W - K_1 K_2``.

    A relative error is ``sqrt(tr(D G Dᵀ) / tr(W G Wᵀ))``. The matrices have nothing to do with each other but that all are worked on at
    once; so are the row classes of each, which don't meet. With all column classes but one fixed, the best block of that one is a
    reduced-rank regression: for ``G_ii = L Lᵀ`` and the residual R of the others, the truncated SVD of ``R G[:, i] L⁻ᵀ``, times ``L⁻¹``. A
    sweep first solves for the whole left factor, the right one fixed, and then goes through the column classes; each step is a minimum in
    what it moves, so the error never rises. It starts from the better of the plain projection and the one that leaves out what G says
    between column classes; where there is one column class, that is the minimum, and there are no sweeps. A matrix is done after
    ``sweeps`` sweeps, or when a sweep lowers its error by less than the share ``enough``. The result is no global minimum.

    With k inner indices for each pair of one of R row and one of C column classes a sweep costs about ``8*k*C*m*n + 2*k*R*n²`` flops, and
    an eigenproblem of size ``min(b1, c2)`` a block. It waits for the device once. Holds two or three times what the grams hold.

    Source: Izenman 1975, "Reduced-rank regression for the multivariate linear model", for one block.
    """
    started = perf_counter()
    cycle = _Cycle(architecture)
    problems = cycle.problems(matrices, grams)
    state = cycle.start(problems)
    errors = [[error] for error in problems.errors(state)]
    products: dict[int, Tensor] = {}
    going = list(range(len(errors)))
    for sweep in range(sweeps + 1):
        is_last = sweep == sweeps or cycle.grid.column_classes == 1
        done = [at for at, number in enumerate(going) if is_last or _has_come_to_rest(errors[number], enough)]
        products |= {going[at]: cycle.grid.scatter(state.left[at] @ state.right[at]) for at in done}
        if len(done) == len(going):
            break
        if done:
            rest = [at for at in range(len(going)) if at not in done]
            going, problems, state = [going[at] for at in rest], _Problems(*_each(problems, rest)), _State(*_each(state, rest))
        state = cycle.visit_column_classes(problems, cycle.solve_left_factor(problems, state))
        for number, error in zip(going, problems.errors(state), strict=True):
            before = errors[number][-1]
            assert error**2 <= before**2 + ROUNDING, f"a sweep raised the error from {before} to {error}"
            errors[number].append(error)
    seconds = (perf_counter() - started) / len(errors)
    return [Fitted(products[number], tuple(of_one), seconds) for number, of_one in enumerate(errors)]


def _has_come_to_rest(errors: Sequence[float], enough: float) -> bool:
    return len(errors) > 1 and errors[-1] >= (1 - enough) * errors[-2]


@dataclass(frozen=True)
class _State:
    """The factors as each row class meets them, with zeros where it has fewer inner indices than the largest; ``inner`` is the number of
    column classes times the largest rank."""

    left: Tensor  # shape: (problems, row classes, b1, inner)
    right: Tensor  # shape: (problems, row classes, inner, n)
    spread: Tensor  # right G, shape: (problems, row classes, inner, n)


@dataclass(frozen=True)
class _Problems:
    """What does not change; rows and columns sorted by their class, and all in float64."""

    weight: Tensor  # shape: (problems, row classes, b1, n)
    gram: Tensor  # shape: (problems, n, n)
    pull: Tensor  # W G, shape: (problems, row classes, b1, n)
    roots: Tensor  # of the diagonal blocks of G, shape: (problems, column classes, c2, c2)
    whole: Tensor  # tr(W G Wᵀ), shape: (problems,)

    def errors(self, state: _State) -> list[float]:
        return self.squared(state).sqrt().tolist()

    def squared(self, state: _State) -> Tensor:  # shape: (problems,)
        lost = ((self.weight - state.left @ state.right) * (self.pull - state.left @ state.spread)).sum((1, 2, 3))
        return lost.clamp_min(0) / self.whole

    def better(self, one: _State, other: _State) -> _State:
        is_other = (self.squared(other) <= self.squared(one))[:, None, None, None]
        return _State(*(new.where(is_other, old) for old, new in zip(_each(one, ...), _each(other, ...), strict=True)))


def _each(of: _Problems | _State, index: list[int] | EllipsisType) -> list[Tensor]:
    return [getattr(of, field.name)[index] for field in fields(of)]


class _Cycle:
    """The steps, for many problems of one architecture."""

    def __init__(self, architecture: Architecture) -> None:
        self.grid = Grid(architecture)
        self.size = architecture.patterns[1].c
        self.rank = int(self.grid.ranks().max())
        self.is_kept = torch.arange(self.rank) < self.grid.ranks().mT[..., None]  # (column classes, row classes, rank)
        self.parts = [slice(start, start + self.size) for start in range(0, self.size * self.grid.column_classes, self.size)]

    def problems(self, matrices: Sequence[Tensor], grams: Sequence[Tensor]) -> _Problems:
        weight = torch.stack([self.grid.gather(matrix) for matrix in matrices])
        columns = self.grid.columns().to(weight.device)
        gram = torch.stack([gram[columns][:, columns] for gram in grams])
        pull = weight @ gram[:, None]
        roots = torch.linalg.cholesky(torch.stack([gram[:, part, part] for part in self.parts], dim=1))
        whole = (weight * pull).sum((1, 2, 3))
        return _Problems(weight, gram, pull, roots, whole.where(whole > 0, 1.0))

    def start(self, problems: _Problems) -> _State:
        blocks = problems.weight.unflatten(3, (-1, self.size)).permute(0, 3, 1, 2, 4)  # (problems, column classes, row classes, b1, c2)
        plain = self._truncated(blocks, self.is_kept)
        roots = problems.roots[:, :, None]
        left, whitened = self._truncated(blocks @ roots, self.is_kept)
        in_metric = left, torch.linalg.solve_triangular(roots, whitened, upper=False, left=False)
        return problems.better(self._from_blocks(problems, *plain), self._from_blocks(problems, *in_metric))

    def solve_left_factor(self, problems: _Problems, state: _State) -> _State:
        system, target = state.spread @ state.right.mT, problems.weight @ state.spread.mT
        diagonal = system.diagonal(dim1=-2, dim2=-1)
        ridge = RIDGE * diagonal.mean(dim=-1, keepdim=True) + (diagonal == 0)
        factor, _ = torch.linalg.cholesky_ex(system + torch.diag_embed(ridge))
        left = torch.cholesky_solve(target.mT, factor).mT
        step = left - state.left
        rise = (step * (step @ system + 2 * (state.left @ system - target))).sum((1, 2, 3), keepdim=True)
        return replace(state, left=left.where(rise <= 0, state.left))  # NaN where there was no solution

    def visit_column_classes(self, problems: _Problems, state: _State) -> _State:
        left, right, spread = state.left.clone(), state.right.clone(), state.spread.clone()
        row_classes, b1 = left.shape[1:3]
        for index, part in enumerate(self.parts):
            inner, roots = self._inner(index), problems.roots[:, index]
            left[..., inner] = 0
            wanted = (problems.pull[..., part] - left @ spread[..., part]).flatten(1, 2)
            whitened = torch.linalg.solve_triangular(roots.mT, wanted, upper=True, left=False)
            left[..., inner], rows = self._truncated(whitened.unflatten(1, (row_classes, b1)), self.is_kept[index])
            rows = torch.linalg.solve_triangular(roots, rows.flatten(1, 2), upper=False, left=False)
            self._put(right, spread, problems, index, rows.unflatten(1, (row_classes, -1)))
        return _State(left, right, spread)

    def _truncated(self, blocks: Tensor, is_kept: Tensor) -> tuple[Tensor, Tensor]:
        """The best products of the ranks that the grid allows; the rows of the right factors are orthonormal, or zero."""
        left, right = truncated_product(blocks.flatten(0, -3), self.rank)
        right = right.unflatten(0, blocks.shape[:-2]) * is_kept.to(right)[..., None]
        return left.unflatten(0, blocks.shape[:-2]), right

    def _from_blocks(self, problems: _Problems, left: Tensor, right: Tensor) -> _State:
        """Put together what is given for each (problem, column class, row class)."""
        of_rows = right.new_zeros(*problems.weight.shape[:2], len(self.parts) * self.rank, problems.gram.shape[-1])
        spread = torch.empty_like(of_rows)
        for index in range(len(self.parts)):
            self._put(of_rows, spread, problems, index, right[:, index])
        return _State(left.permute(0, 2, 3, 1, 4).flatten(3), of_rows, spread)

    def _put(self, right: Tensor, spread: Tensor, problems: _Problems, index: int, rows: Tensor) -> None:
        """Write a column class's ``rows`` of the right factor, shape (problems, row classes, largest rank, c2), and what goes with them."""
        part, inner = self.parts[index], self._inner(index)
        right[:, :, inner, part] = rows
        spread[:, :, inner] = (rows.flatten(1, 2) @ problems.gram[:, part]).unflatten(1, rows.shape[1:3])

    def _inner(self, index: int) -> slice:
        return slice(index * self.rank, (index + 1) * self.rank)


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
