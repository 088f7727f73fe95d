"""One factor by each implementation that Gonon et al. 2024 compare, with rows of x adjacent or features last."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from flysurgery.factors import factor_to_dense, to_blocks
from flysurgery.ops import BACKENDS, Problem
from flysurgery.patterns import Architecture, Pattern

Run = Callable[[Tensor], Tensor]

NAMES = ("dense", "cuda", "bmm", "einsum", "bsr", "sparse")

FIRST, LAST = "first", "last"
"""Batch-size-first: x of shape (rows, features), as models have it. Batch-size-last: (features, rows)."""

PRODUCT_ONLY = "bmm product only"
"""The batched product of bmm on blocks that lie ready, without the copies before and after it."""

MOST_DENSE_ENTRIES = 1 << 25
"""Larger dense matrices are left out: they would take most of the run."""

MOST_DENSE_ENTRIES_OF_HALVES = 1 << 30
"""The same on CUDA in fp16 and bf16, which take a fifteenth of float32's time."""

MOST_CSR_ENTRIES = 1 << 18
"""The same for matrices in CSR, whose products take tens of times as long as batched ones of as many operations."""


def factor_runs(factor: Tensor, layout: str, problem: Problem, names: Sequence[str] = NAMES) -> tuple[dict[str, Run], dict[str, str]]:
    """Implementations with their weights prepared, by name, and those that cannot run, with the reason."""
    runs: dict[str, Run] = {}
    refused: dict[str, str] = {}
    pattern = problem.architecture.patterns[0]
    for name in names:
        reason = BACKENDS[name].can_run(problem)
        if name == "dense" and pattern.in_features * pattern.out_features > most_dense_entries(problem):
            reason = f"left out: {pattern.in_features * pattern.out_features:.1e} entries, nearly all zero"
        if name == "sparse" and pattern.nnz > MOST_CSR_ENTRIES:
            reason = f"left out: {pattern.nnz:.1e} entries, which take CSR longer than all others together"
        if name == "cuda" and layout == LAST:
            reason = "no: our kernels take batch-size-first, as models have it"
        if reason is not None:
            refused[name] = reason
        elif layout == FIRST:
            runs[name] = BACKENDS[name].bind((factor,), None)
        else:
            runs[name] = _last(name, factor, pattern)
    return runs, refused


def most_dense_entries(problem: Problem) -> int:
    """Entries of the largest dense matrix that is timed."""
    halves = problem.device_type == "cuda" and problem.dtype.itemsize == 2
    return MOST_DENSE_ENTRIES_OF_HALVES if halves else MOST_DENSE_ENTRIES


def rows_first(run: Run) -> Run:
    """The same, with the result seen as (rows, features): a view, which costs nothing."""
    return lambda x: run(x).T


def blocks_of(x: Tensor, pattern: Pattern, layout: str) -> Tensor:
    """x as the batched product wants it: (a*d, rows, c), or (a*d, c, rows) with the batch last."""
    a, _, c, d = pattern.factor_shape
    if layout == FIRST:
        return x.view(-1, a, c, d).permute(1, 3, 0, 2).reshape(a * d, -1, c)
    return x.view(a, c, d, -1).permute(0, 2, 1, 3).reshape(a * d, c, -1)


def product_only(factor: Tensor, layout: str) -> Run:
    """The batched product alone, for an x that ``blocks_of`` made."""
    blocks = to_blocks(factor).contiguous()
    if layout == FIRST:
        return lambda x: torch.bmm(x, blocks.mT)
    return lambda x: torch.bmm(blocks, x)


def rows_of_blocks(product: Tensor, rows: list[int], pattern: Pattern, layout: str) -> Tensor:
    """Some rows of what ``product_only`` gives, as (rows, features)."""
    if layout == LAST:
        return _unblocked(product[:, :, rows], pattern).T
    return product[:, rows].unflatten(0, (pattern.a, pattern.d)).permute(2, 0, 3, 1).flatten(1)  # shape: (rows, a*b*d)


def _last(name: str, factor: Tensor, pattern: Pattern) -> Run:
    if name == "dense":
        dense = factor_to_dense(factor)
        return lambda x: dense @ x
    if name == "einsum":
        return lambda x: torch.einsum("ipqj,iqjk->ipjk", factor, x.unflatten(0, (pattern.a, pattern.c, pattern.d))).flatten(0, 2)
    if name == "bmm":
        blocks = to_blocks(factor).contiguous()
        return lambda x: _unblocked(torch.bmm(blocks, blocks_of(x, pattern, LAST)), pattern)
    prepare = getattr(BACKENDS[name], "prepare")  # noqa: B009 - a backend that goes factor by factor
    stored = prepare(factor)
    if name == "sparse":
        return lambda x: stored @ x
    return lambda x: _unblocked((stored @ blocks_of(x, pattern, LAST).flatten(0, 1)).unflatten(0, (-1, pattern.b)), pattern)


def _unblocked(product: Tensor, pattern: Pattern) -> Tensor:  # shapes: (a*d, b, rows) -> (a*b*d, rows)
    return product.unflatten(0, (pattern.a, pattern.d)).transpose(1, 2).flatten(0, 2)


def problem_of_factor(pattern: Pattern, rows: int, x: Tensor, *, allow_tf32: bool) -> Problem:
    """The multiplication of one factor."""
    return Problem(Architecture((pattern,)), rows, x.dtype, x.device.type, allow_tf32=allow_tf32)
