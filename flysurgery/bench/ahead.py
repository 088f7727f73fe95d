"""Kernels compiled before they are timed, on all cores: a run of many patterns would else wait for each."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import torch

from flysurgery.errors import BackendError
from flysurgery.ops.cuda.configured import chosen_factor
from flysurgery.ops.cuda.cubins import find_cubin
from flysurgery.ops.cuda.kernel import device_arch
from flysurgery.ops.cuda.obstacles import shared_limit_of
from flysurgery.ops.cuda.single import single_reason
from flysurgery.patterns import Pattern

Job = tuple[str, str, tuple[tuple[str, int], ...], str]


def compile_ahead(patterns: Sequence[Pattern], rows: int, modes: Sequence[str], device: torch.device) -> int:
    """Compile what the patterns need and the cache folder lacks; gives how many kernels that are. Nothing to do without CUDA."""
    if device.type != "cuda":
        return 0
    index = device.index or 0
    limit, arch = shared_limit_of(index), device_arch(index)
    jobs: set[Job] = set()
    for pattern in patterns:
        for mode in modes:
            if single_reason(pattern, mode, limit) is None:
                sources = chosen_factor(pattern, mode, index, rows).sources()
                jobs.update((source, name, tuple(defines.items()), arch) for source, name, defines in sources)
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        list(pool.map(_compile, sorted(jobs), chunksize=4))
    return len(jobs)


def _compile(job: Job) -> None:
    source, name, defines, arch = job
    try:
        find_cubin(source, dict(defines), arch=arch, name=name)
    except BackendError:  # the row of that pattern will say so
        return
