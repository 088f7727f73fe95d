"""Products of two factors that are near a matrix in what they do to given inputs."""

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import NamedTuple

import torch
from torch import Tensor

from flysurgery.patterns import Architecture
from flysurgery.projection.two_factor import Grid, truncated_product

SWEEPS = 10
ENOUGH = 1e-3
"""A sweep that lowers the error by less than this share is the last."""
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
) -> list[Fitted]:
    """Find for each matrix W with its G a product ``K_1 K_2`` that makes ``tr(D G Dᵀ)`` small, with ``D = W - K_1 K_2``.

    A relative error is ``sqrt(tr(D G Dᵀ) / tr(W G Wᵀ))``. The matrices have nothing to do with each other but that all are worked on at
    once; so are the row classes of each, which don't meet. With all column classes but one fixed, the best block of that one is a
    reduced-rank regression: for ``G_ii = L Lᵀ`` and the residual R of the others, the truncated SVD of ``R G[:, i] L⁻ᵀ``, times ``L⁻¹``. A
    sweep first solves for the whole left factor, the right one fixed, and then goes through the column classes; each step is a minimum in
    what it moves, so the error never rises. It starts from the better of the plain projection and the one that leaves out what G says
    between column classes; where there is one column class, that is the minimum, and there are no sweeps. A matrix is done after
    ``sweeps`` sweeps, or when a sweep lowers its error by less than the share ``ENOUGH``. The result is no global minimum.

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
        is_last = sweep == sweeps or len(cycle.parts) == 1
        done = [at for at, number in enumerate(going) if is_last or _has_come_to_rest(errors[number])]
        if done:
            products |= {going[at]: cycle.grid.scatter(product) for at, product in zip(done, state.product[done], strict=True)}
        if len(done) == len(going):
            break
        if done:
            rest = [at for at in range(len(going)) if at not in done]
            going = [going[at] for at in rest]
            problems, state = _Problems(*(each[rest] for each in problems)), _State(*(each[rest] for each in state))
        state = cycle.visit_column_classes(problems, cycle.solve_left_factor(problems, state))
        for number, error in zip(going, problems.errors(state), strict=True):
            errors[number].append(error)
    seconds = (perf_counter() - started) / len(errors)
    return [Fitted(products[number], tuple(of_one), seconds) for number, of_one in enumerate(errors)]


def _has_come_to_rest(errors: Sequence[float]) -> bool:
    return len(errors) > 1 and errors[-1] >= (1 - ENOUGH) * errors[-2]


class _State(NamedTuple):
    """The factors block by block, with zeros where a block has fewer inner indices than the largest ``rank``."""

    left: Tensor  # shape: (problems, row classes, b1, column classes, rank)
    right: Tensor  # shape: (problems, row classes, column classes, rank, c2)
    spread: Tensor  # right G, shape: (problems, row classes, column classes, rank, n)

    @property
    def product(self) -> Tensor:  # shape: (problems, row classes, b1, n)
        return torch.einsum("prbck,prckq->prbcq", self.left, self.right).flatten(3)


class _Problems(NamedTuple):
    """What does not change; rows and columns sorted by their class, and all in float64."""

    weight: Tensor  # shape: (problems, row classes, b1, n)
    gram: Tensor  # shape: (problems, column classes, c2, n)
    pull: Tensor  # W G, shape: (problems, row classes, b1, n)
    roots: Tensor  # of the diagonal blocks of G, shape: (problems, column classes, c2, c2)
    whole: Tensor  # tr(W G Wᵀ), shape: (problems,)

    def state(self, left: Tensor, right: Tensor) -> _State:
        return _State(left, right, torch.einsum("prckq,pcqn->prckn", right, self.gram).contiguous())

    def errors(self, state: _State) -> list[float]:
        return self.squared(state).sqrt().tolist()

    def squared(self, state: _State) -> Tensor:  # shape: (problems,)
        lost = ((self.weight - state.product) * (self.pull - _summed(state.left, state.spread))).sum((1, 2, 3))
        return lost.clamp_min(0) / self.whole


def _summed(left: Tensor, rows: Tensor) -> Tensor:
    """The product of left factors and rows of right ones, summed over the column classes; shape (problems, row classes, b1, n)."""
    return left.flatten(3) @ rows.flatten(2, 3)


class _Cycle:
    """The steps, for many problems of one architecture."""

    def __init__(self, architecture: Architecture) -> None:
        self.grid = Grid(*architecture)
        sizes, size = (self.grid.rows.count, self.grid.columns.count), architecture.patterns[1].c
        ranks = torch.bincount(self.grid.block_of_inner, minlength=sizes[0] * sizes[1]).reshape(sizes)
        self.rank = int(ranks.max())
        self.is_kept = torch.arange(self.rank) < ranks[..., None]  # shape: (row classes, column classes, rank)
        self.parts = [slice(start, start + size) for start in range(0, architecture.in_features, size)]  # of each column class

    def problems(self, matrices: Sequence[Tensor], grams: Sequence[Tensor]) -> _Problems:
        weight = torch.stack([self.grid.gather(matrix) for matrix in matrices])
        columns = self.grid.columns.order.to(weight.device)
        gram = torch.stack([gram[columns][:, columns] for gram in grams])
        pull = weight @ gram[:, None]
        roots = torch.linalg.cholesky(torch.stack([gram[:, part, part] for part in self.parts], dim=1))
        whole = (weight * pull).sum((1, 2, 3))
        return _Problems(weight, gram.unflatten(1, (len(self.parts), -1)), pull, roots, whole.where(whole > 0, 1.0))

    def start(self, problems: _Problems) -> _State:
        blocks = problems.weight.unflatten(3, (len(self.parts), -1)).transpose(2, 3)
        left, right = self._truncated(blocks, self.is_kept)
        plain = problems.state(left.transpose(2, 3), right)
        roots = problems.roots[:, None]
        left, whitened = self._truncated(blocks @ roots, self.is_kept)
        right = torch.linalg.solve_triangular(roots, whitened, upper=False, left=False)
        in_metric = problems.state(left.transpose(2, 3), right)
        is_better = (problems.squared(in_metric) <= problems.squared(plain))[:, None, None, None, None]
        return _State(*(new.where(is_better, old) for old, new in zip(plain, in_metric, strict=True)))

    def solve_left_factor(self, problems: _Problems, state: _State) -> _State:
        before, spread = state.left.flatten(3), state.spread.flatten(2, 3)
        by_class = spread.unflatten(3, (len(self.parts), -1))
        system = torch.einsum("prmcq,prckq->prmck", by_class, state.right).flatten(3)
        target = problems.weight @ spread.mT
        diagonal = system.diagonal(dim1=-2, dim2=-1)
        ridge = RIDGE * diagonal.mean(dim=-1, keepdim=True) + (diagonal == 0)
        factor, _ = torch.linalg.cholesky_ex(system + torch.diag_embed(ridge))
        left = torch.cholesky_solve(target.mT, factor).mT
        step = left - before
        rise = (step * (step @ system + 2 * (before @ system - target))).sum((1, 2, 3), keepdim=True)
        left = left.where(rise <= 0, before)  # NaN where there was no solution
        return state._replace(left=left.unflatten(3, (len(self.parts), -1)))

    def visit_column_classes(self, problems: _Problems, state: _State) -> _State:
        left, right, spread = (each.clone() for each in state)
        in_rows = (self.grid.rows.count, -1)
        for index, part in enumerate(self.parts):
            left[..., index, :] = 0
            wanted = (problems.pull[..., part] - _summed(left, spread[..., part])).flatten(1, 2)
            roots = problems.roots[:, index]
            whitened = torch.linalg.solve_triangular(roots.mT, wanted, upper=True, left=False)
            left[..., index, :], rows = self._truncated(whitened.unflatten(1, in_rows), self.is_kept[:, index])
            rows = torch.linalg.solve_triangular(roots, rows.flatten(1, 2), upper=False, left=False)
            right[:, :, index] = rows.unflatten(1, in_rows)
            spread[:, :, index] = (rows @ problems.gram[:, index]).unflatten(1, in_rows)
        return _State(left, right, spread)

    def _truncated(self, blocks: Tensor, is_kept: Tensor) -> tuple[Tensor, Tensor]:
        """The best products of the ranks that the grid allows; the rows of the right factors are orthonormal, or zero."""
        left, right = truncated_product(blocks.flatten(0, -3), self.rank)
        right = right.unflatten(0, blocks.shape[:-2]) * is_kept.to(right)[..., None]
        return left.unflatten(0, blocks.shape[:-2]), right


def low_ranks(matrix: Tensor, ranks: Sequence[int], gram: Tensor) -> list[Fitted]:
    """Find for each rank the product that makes ``tr(D G Dᵀ)`` least, which is a reduced-rank regression; as in ``cycle_together``.

    For ``G = L Lᵀ`` it is the truncated SVD of ``W L``, times ``L⁻¹``. All ranks take their leading triples from one eigenproblem of size
    ``min(out_features, in_features)``.

    Source: Izenman 1975, "Reduced-rank regression for the multivariate linear model".
    """
    started = perf_counter()
    root = torch.linalg.cholesky(gram)
    target = matrix @ root
    left, rows = (each[0] for each in truncated_product(target[None], max(ranks)))
    right = torch.linalg.solve_triangular(root, rows, upper=False, left=False)
    products = [left[:, :rank] @ right[:rank] for rank in ranks]
    whole = torch.linalg.vector_norm(target)
    lost = torch.stack([torch.linalg.vector_norm(target - left[:, :rank] @ rows[:rank]) for rank in ranks])
    errors = (lost / whole.where(whole > 0, 1.0)).tolist()
    seconds = (perf_counter() - started) / len(ranks)
    return [Fitted(product, (error,), seconds) for product, error in zip(products, errors, strict=True)]
