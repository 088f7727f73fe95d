"""One factor by every implementation and in both memory layouts: Tables 2, 4 and 7 of Gonon et al. 2024."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_all_start_methods, get_context

import torch
from torch import Tensor

from flysurgery.bench import TIMED_MODES, Case, Protocol, Record, rows_of_case
from flysurgery.bench.ceilings import work_of_factor
from flysurgery.bench.measuring import MEASURED, checked_rows
from flysurgery.errors import BackendError
from flysurgery.factors import factor_to_dense, ks_einsum, to_blocks
from flysurgery.gpu.configured import factor_configs, factor_product
from flysurgery.gpu.cubins import find_cubin
from flysurgery.gpu.device import shared_limit_of
from flysurgery.gpu.kernel import ARCH
from flysurgery.gpu.single_choice import candidates, remember
from flysurgery.gpu.single_tiling import SingleConfig
from flysurgery.ops import BACKENDS, Problem
from flysurgery.patterns import Architecture, Pattern

Run = Callable[[Tensor], Tensor]
PatternAndMode = tuple[Pattern, str]

NAMES = ("dense", "bmm", "cuda", "einsum", "bsr", "sparse")

FIRST, LAST = "first", "last"
"""Batch-size-first: x of shape (rows, features), as models have it. Batch-size-last: (features, rows)."""

PRODUCT_ONLY = "bmm product only"
"""The batched product of bmm on blocks that are ready, without the copies before and after it."""

HEAD = ("a", "b", "c", "d", "rewriting", "size", "rows", "mode", "device_type", "layout")
FACTOR_COLUMNS = (*HEAD, "candidate", *MEASURED)
"""``rewriting`` is (b+c)/(bc). Where dense is left out there is no ratio, and bmm is timed twice."""

CHECKED_ROWS = 128

MOST_DENSE_ENTRIES = 1 << 25
"""Larger dense matrices are left out: they would take most of the run."""

MOST_DENSE_ENTRIES_OF_HALVES = 1 << 30
"""The same on CUDA in fp16 and bf16, which take a fifteenth of float32's time."""

MOST_CSR_ENTRIES = 1 << 18
"""The same for matrices in CSR, whose products take tens of times as long as batched ones of as many operations."""

MOST_PROCESSES = 8
"""This many processes prepare cases faster than the cases are timed, and leave cores to the timing."""


def factor_head(pattern: Pattern, rows: int, mode: str, device: torch.device) -> Record:
    """What tells the rows of one pattern from others."""
    return dict(zip("abcd", pattern.factor_shape, strict=True)) | {"rows": rows, "mode": mode, "device_type": device.type}


def factor_rows(pattern: Pattern, rows: int, mode: str, device: torch.device, protocol: Protocol) -> list[Record]:
    sizes = {"rewriting": (pattern.b + pattern.c) / (pattern.b * pattern.c), "size": pattern.in_features * pattern.out_features}
    found = []
    for layout in (FIRST, LAST):
        head = factor_head(pattern, rows, mode, device) | sizes | {"layout": layout}
        measured = rows_of_case(head, partial(factor_case, pattern, rows, mode, layout, device, protocol.seed), mode, protocol)
        has_dense = any(row["candidate"] == "dense" and row["median_ms"] for row in measured)
        without_ratio = {"ratio_to_dense": None}
        found += [row | (without_ratio if row["candidate"] == PRODUCT_ONLY or not has_dense else {}) for row in measured]
    return found


def factor_case(pattern: Pattern, rows: int, mode: str, layout: str, device: torch.device, seed: int) -> Case:
    """One factor in one layout, weights uniform with variance 1/(3c) and Gaussian x."""
    generator = torch.Generator(device=device).manual_seed(seed)
    x = torch.randn(rows, pattern.in_features, generator=generator, device=device, dtype=TIMED_MODES[mode])
    factor = torch.empty(pattern.factor_shape, device=device).uniform_(-(pattern.c**-0.5), pattern.c**-0.5, generator=generator)
    factor = factor.to(x.dtype)
    checked = checked_rows(rows, CHECKED_ROWS)
    truth = ks_einsum(x[checked].double(), factor.double())
    runs = factor_runs(factor, layout, problem_of_factor(pattern, x, allow_tf32=mode == "tf32"))
    arranged = x if layout == FIRST else x.T.contiguous()
    work = work_of_factor(pattern, rows, x.element_size())
    return Case(
        runs | {PRODUCT_ONLY: product_only(factor, layout)},
        dict.fromkeys(runs, arranged) | {PRODUCT_ONLY: blocks_of(arranged, pattern, layout).contiguous()},
        dict.fromkeys(runs, truth) | {PRODUCT_ONLY: truth.unflatten(1, (pattern.a, pattern.b, pattern.d))},
        checked,
        work,
        "bmm" if isinstance(runs["dense"], str) else "dense",
    )


def factor_runs(factor: Tensor, layout: str, problem: Problem, names: Sequence[str] = NAMES) -> dict[str, Run | str]:
    """Implementations with their weights prepared, by name, or why one cannot run.

    An implementation takes x in ``layout`` and gives a tensor of shape (rows, out_features), which is a view for batch-size-last.
    """
    runs: dict[str, Run | str] = {}
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
            runs[name] = reason
        else:
            runs[name] = BACKENDS[name].bind((factor,), None) if layout == FIRST else _last(name, factor, pattern)
    return runs


def most_dense_entries(problem: Problem) -> int:
    """The entries of the largest dense matrix that is timed."""
    halves = problem.device_type == "cuda" and problem.dtype.itemsize == 2
    return MOST_DENSE_ENTRIES_OF_HALVES if halves else MOST_DENSE_ENTRIES


def problem_of_factor(pattern: Pattern, x: Tensor, *, allow_tf32: bool) -> Problem:
    return Problem(Architecture((pattern,)), len(x), x.dtype, x.device.type, allow_tf32=allow_tf32)


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
    if name == "dense":
        dense = factor_to_dense(factor)
        return lambda x: (dense @ x).T
    if name == "einsum":
        return lambda x: torch.einsum("ipqj,iqjk->ipjk", factor, x.unflatten(0, (pattern.a, pattern.c, pattern.d))).flatten(0, 2).T
    if name == "bmm":
        blocks = to_blocks(factor).contiguous()
        return lambda x: _unblocked(torch.bmm(blocks, blocks_of(x, pattern, LAST)), pattern).T
    prepare = getattr(BACKENDS[name], "prepare")  # noqa: B009 - a backend that works factor by factor
    stored = prepare(factor)
    if name == "sparse":
        return lambda x: (stored @ x).T
    return lambda x: _unblocked((stored @ blocks_of(x, pattern, LAST).flatten(0, 1)).unflatten(0, (-1, pattern.b)), pattern).T


def _unblocked(product: Tensor, pattern: Pattern) -> Tensor:  # shapes: (a*d, b, rows) -> (a*b*d, rows)
    return product.unflatten(0, (pattern.a, pattern.d)).transpose(1, 2).flatten(0, 2)


def compiled_ahead(cases: Sequence[PatternAndMode], rows: int, device: torch.device) -> Iterator[PatternAndMode]:
    """The cases in their order, each when its kernels are in the cache folder; at once without CUDA.

    Other processes search for kernels and compile them meanwhile, so that a run of many patterns does not wait for each.
    """
    if device.type != "cuda":
        yield from cases
        return
    index = device.index or 0
    limit = shared_limit_of(index)
    prepare = partial(prepared, rows=rows, shared_limit=limit)
    # the processes must not inherit this one's CUDA device; a fork server imports PyTorch once for all
    has_server = "forkserver" in get_all_start_methods()
    context = get_context("forkserver" if has_server else "spawn")
    if has_server:
        context.set_forkserver_preload(["flysurgery.ops"])
    pool = ProcessPoolExecutor(min(MOST_PROCESSES, os.cpu_count() or 1), mp_context=context)
    try:
        for (pattern, mode), found in zip(cases, pool.map(prepare, cases), strict=True):
            remember(pattern, mode, limit, found)
            yield pattern, mode
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def prepared(case: PatternAndMode, *, rows: int, shared_limit: int) -> tuple[SingleConfig, ...]:
    """Compile what the product takes without a tuned table, and give the configurations that were found for it."""
    pattern, mode = case
    found = candidates(pattern, mode, shared_limit)
    if found:
        product = factor_product(pattern, mode, factor_configs(pattern, mode, rows, shared_limit)[0], shared_limit)
        for source, name, defines in product.sources():
            try:
                find_cubin(source, defines, arch=ARCH, name=name)
            except BackendError:  # the row of that pattern will say so
                break
    return found
