"""One factor by every implementation and in both memory layouts: Tables 2, 4 and 7 of Gonon et al. 2024."""

from __future__ import annotations

import torch
from recipe import Place, Run
from torch import Tensor

from flysurgery.bench import TIMED_MODES, Case
from flysurgery.bench.ceilings import work_of_factor
from flysurgery.bench.measuring import checked_rows
from flysurgery.factors import factor_to_dense, ks_einsum, to_blocks
from flysurgery.ops import BACKENDS, Problem
from flysurgery.patterns import Architecture, Pattern

FIRST, LAST = "first", "last"
"""Batch-size-first: x of shape (rows, features), as models have it. Batch-size-last: (features, rows)."""

PRODUCT_ONLY = "bmm product only"
"""The batched product of bmm on blocks that are ready, without the copies before and after it."""

CANDIDATES = ("dense", "bmm", "cuda", "einsum", "bsr", "sparse", PRODUCT_ONLY)
"""Where dense is left out, ratios are to bmm, which is timed twice."""

CHECKED_ROWS = 128

MOST_DENSE_ENTRIES = 1 << 25
"""Larger dense matrices are left out: they would take most of the run."""

MOST_DENSE_ENTRIES_OF_HALVES = 1 << 30
"""The same on CUDA in fp16 and bf16, which take a fifteenth of float32's time."""

MOST_CSR_ENTRIES = 1 << 18
"""The same for matrices in CSR, whose products take tens of times as long as batched ones of as many operations."""


def factor_case(place: Place, *, a: int, b: int, c: int, d: int, rows: int, mode: str, layout: str, candidates: tuple[str, ...]) -> Case:
    """One factor in one layout, weights uniform with variance 1/(3c) and Gaussian x."""
    pattern = Pattern(a, b, c, d)
    generator = torch.Generator(device=place.device).manual_seed(place.protocol.seed)
    x = torch.randn(rows, pattern.in_features, generator=generator, device=place.device, dtype=TIMED_MODES[mode])
    factor = torch.empty(pattern.factor_shape, device=place.device).uniform_(-(c**-0.5), c**-0.5, generator=generator).to(x.dtype)
    checked = checked_rows(rows, CHECKED_ROWS)
    truth = ks_einsum(x[checked].double(), factor.double())
    problem = Problem(Architecture((pattern,)), rows, x.dtype, place.device.type, allow_tf32=mode == "tf32")
    runs = {name: factor_run(name, factor, layout, problem) for name in candidates}
    arranged = x if layout == FIRST else x.T.contiguous()
    inputs, truths = dict.fromkeys(runs, arranged), dict.fromkeys(runs, truth)
    if PRODUCT_ONLY in runs:
        inputs[PRODUCT_ONLY] = blocks_of(arranged, pattern, layout).contiguous()
        truths[PRODUCT_ONLY] = truth.unflatten(1, (a, b, d))
    has_dense = not isinstance(runs.get("dense", ""), str)
    return Case(runs, inputs, truths, checked, work_of_factor(pattern, rows, x.element_size()), "dense" if has_dense else "bmm")


def factor_run(name: str, factor: Tensor, layout: str, problem: Problem) -> Run | str:
    """An implementation with its weights prepared, or why it cannot run.

    It takes x in ``layout`` and gives a tensor of shape (rows, out_features), which is a view for batch-size-last.
    """
    if name == PRODUCT_ONLY:
        return product_only(factor, layout)
    pattern = problem.architecture.patterns[0]
    entries = pattern.in_features * pattern.out_features
    halves = problem.device_type == "cuda" and problem.dtype.itemsize == 2
    if name == "dense" and entries > (MOST_DENSE_ENTRIES_OF_HALVES if halves else MOST_DENSE_ENTRIES):
        return f"left out: {entries:.1e} entries, nearly all zero"
    if name == "sparse" and pattern.nnz > MOST_CSR_ENTRIES:
        return f"left out: {pattern.nnz:.1e} entries, which take CSR longer than all others together"
    if name == "cuda" and layout == LAST:
        return "no: our kernels take batch-size-first, as models have it"
    reason = BACKENDS[name].can_run(problem)
    if reason is not None:
        return reason
    return BACKENDS[name].bind((factor,), None) if layout == FIRST else _last(name, factor, pattern)


def blocks_of(x: Tensor, pattern: Pattern, layout: str) -> Tensor:
    """x as the batched product wants it: (a*d, rows, c), or (a*d, c, rows) with the batch last."""
    a, _, c, d = pattern.factor_shape
    if layout == FIRST:
        return x.view(-1, a, c, d).permute(1, 3, 0, 2).reshape(a * d, -1, c)
    return x.view(a, c, d, -1).permute(0, 2, 1, 3).reshape(a * d, c, -1)


def product_only(factor: Tensor, layout: str) -> Run:
    """The batched product alone, for an x that ``blocks_of`` made; it gives a view of shape (rows, a, b, d)."""
    blocks, (a, _, _, d) = to_blocks(factor).contiguous(), factor.shape
    if layout == FIRST:
        return lambda x: torch.bmm(x, blocks.mT).unflatten(0, (a, d)).permute(2, 0, 3, 1)
    return lambda x: torch.bmm(blocks, x).unflatten(0, (a, d)).permute(3, 0, 2, 1)


def _last(name: str, factor: Tensor, pattern: Pattern) -> Run:
    """An implementation for x of shape (features, rows)."""
    if name == "einsum":
        return lambda x: torch.einsum("ipqj,iqjk->ipjk", factor, x.unflatten(0, (pattern.a, pattern.c, pattern.d))).flatten(0, 2).T
    if name == "bmm":
        blocks = to_blocks(factor).contiguous()
        return lambda x: _unblocked(torch.bmm(blocks, blocks_of(x, pattern, LAST)), pattern).T
    prepare = factor_to_dense if name == "dense" else getattr(BACKENDS[name], "prepare")  # noqa: B009 - they work factor by factor
    stored = prepare(factor)
    if name in ("dense", "sparse"):
        return lambda x: (stored @ x).T
    return lambda x: _unblocked((stored @ blocks_of(x, pattern, LAST).flatten(0, 1)).unflatten(0, (-1, pattern.b)), pattern).T


def _unblocked(product: Tensor, pattern: Pattern) -> Tensor:  # shapes: (a*d, b, rows) -> (a*b*d, rows)
    return product.unflatten(0, (pattern.a, pattern.d)).transpose(1, 2).flatten(0, 2)
