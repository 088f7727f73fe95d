"""Threads for work on layers side by side."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache

import torch

MAX_WORKERS = 8
"""Layers at work at once; each holds several copies of its weight in float64."""


@contextmanager
def workers() -> Iterator[ThreadPoolExecutor]:
    """A pool of threads, each with one BLAS thread; jobs that have not begun when it ends are dropped.

    Blocks of layers are too small to share among BLAS threads, which costs twice the processor time and, on a busy machine, many
    times the wall time. PyTorch loads its CUDA linear algebra with the first call that needs it, and fails if several threads
    make that call at once; so this thread makes one beforehand where CUDA is in use.
    """
    if torch.cuda.is_initialized():
        torch.linalg.cholesky(torch.eye(1, device="cuda"))
    threads = torch.get_num_threads()
    pool = ThreadPoolExecutor(min(threads, MAX_WORKERS), initializer=torch.set_num_threads, initargs=(1,))
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(threads)


@cache
def every_core() -> tuple[ThreadPoolExecutor, int]:
    """A pool with as many threads as this process may use cores, each with one BLAS thread, and their number.

    It is for jobs of milliseconds that wait for no other, and lasts as long as the process.
    """
    size = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return ThreadPoolExecutor(size, initializer=torch.set_num_threads, initargs=(1,)), size
