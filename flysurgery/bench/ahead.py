"""Kernels searched for and compiled while others are timed: a run of many patterns would else wait for each."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_all_start_methods, get_context
from multiprocessing.context import BaseContext

import torch

from flysurgery.errors import BackendError
from flysurgery.ops.cuda.configured import factor_configs, factor_product
from flysurgery.ops.cuda.cubins import find_cubin
from flysurgery.ops.cuda.kernel import device_arch
from flysurgery.ops.cuda.obstacles import shared_limit_of
from flysurgery.ops.cuda.single_choice import candidates, remember
from flysurgery.ops.cuda.single_tiling import SingleConfig
from flysurgery.patterns import Pattern

Case = tuple[Pattern, str]
"""A pattern and a mode."""

_PROCESSES = 8
"""At most: they prepare cases faster than these are timed, and leave cores to the timing."""


def compiled_ahead(cases: Sequence[Case], rows: int, device: torch.device) -> Iterator[Case]:
    """The cases in their order, each when its kernels lie in the cache folder; at once without CUDA."""
    if device.type != "cuda":
        yield from cases
        return
    index = device.index or 0
    limit = shared_limit_of(index)
    prepare = partial(prepared, rows=rows, shared_limit=limit, arch=device_arch(index))
    pool = ProcessPoolExecutor(min(_PROCESSES, os.cpu_count() or 1), mp_context=_context())
    try:
        for (pattern, mode), found in zip(cases, pool.map(prepare, cases), strict=True):
            remember(pattern, mode, limit, found)
            yield pattern, mode
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _context() -> BaseContext:
    """Processes that know nothing of this one's CUDA device, and where there is a fork server import PyTorch once for all."""
    if "forkserver" not in get_all_start_methods():
        return get_context("spawn")
    context = get_context("forkserver")
    context.set_forkserver_preload([__name__])
    return context


def prepared(case: Case, *, rows: int, shared_limit: int, arch: str) -> tuple[SingleConfig, ...]:
    """Compile what the product takes without a tuned table; gives the configurations that were found for it."""
    pattern, mode = case
    found = candidates(pattern, mode, shared_limit)
    if found:
        product = factor_product(pattern, mode, factor_configs(pattern, mode, rows, shared_limit)[0], shared_limit)
        for source, name, defines in product.sources():
            try:
                find_cubin(source, defines, arch=arch, name=name)
            except BackendError:  # the row of that pattern will say so
                break
    return found
