"""Kernels compiled before they are timed, on all cores: a run of many patterns would else wait for each."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import torch

from flysurgery.errors import BackendError
from flysurgery.ops.cuda.cubins import find_cubin
from flysurgery.ops.cuda.kernel import device_arch
from flysurgery.ops.cuda.obstacles import shared_limit_of
from flysurgery.ops.cuda.single import SingleFactor, single_reason
from flysurgery.patterns import Pattern

Job = tuple[tuple[tuple[str, int], ...], str]


def compile_ahead(patterns: Sequence[Pattern], modes: Sequence[str], device: torch.device) -> int:
    """Compile what the patterns need and the cache folder lacks; gives how many kernels that are. Nothing to do without CUDA."""
    if device.type != "cuda":
        return 0
    index = device.index or 0
    limit, arch = shared_limit_of(index), device_arch(index)
    jobs: set[Job] = set()
    for pattern in patterns:
        for mode in modes:
            if single_reason(pattern, mode, limit) is None:
                tile = SingleFactor(pattern, mode, shared_limit=limit).tile
                jobs.add((tuple(tile.defines(tile.x_vector).items()), arch))
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        list(pool.map(_compile, sorted(jobs), chunksize=4))
    return len(jobs)


def _compile(job: Job) -> None:
    defines, arch = job
    try:
        find_cubin("single_factor.cu", dict(defines), arch=arch, name="single_factor")
    except BackendError:  # the row of that pattern will say so
        return
