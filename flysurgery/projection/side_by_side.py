"""Many matrices fitted to what they are given: alike ones together, others side by side."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from flysurgery.patterns import Architecture, family_of
from flysurgery.projection.block_cycling import SWEEPS, Fitted, cycle_together, low_ranks

T = TypeVar("T")

MAX_WORKERS = 8
"""Layers at work at once; each holds several copies of its weight in float64."""

TOGETHER_BYTES = {"cpu": 16 << 20, "cuda": 1 << 30}
"""Of matrices that are worked on together; on a CPU larger ones gain nothing by it, on a GPU small ones keep it waiting."""


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


@dataclass(frozen=True)
class FitProblem:
    """One matrix, of any floating dtype and on any device, with the architecture that it gets and the metric of its inputs.

    ``gram`` has the shape (in_features, in_features), is positive definite and in float64, and lies where the work is done.
    """

    weight: Tensor  # shape: (out_features, in_features)
    architecture: Architecture
    gram: Tensor

    @property
    def matrix(self) -> Tensor:
        """The weight in float64, where the Gram matrix is."""
        return self.weight.detach().to(self.gram)


def fit_side_by_side(
    problems: Sequence[FitProblem],
    finish: Callable[[int, Fitted | None], T],
    *,
    sweeps: int = SWEEPS,
) -> Iterator[tuple[int, T]]:
    """Fit each problem by ``cycle_together`` and give its number with what ``finish(number, fitted)`` makes of it, as they are done.

    Without two factors nothing is fitted, and ``fitted`` is None. ``finish`` is called in other threads, several at once, and what it
    raises is raised here. Problems come in their order, but that those of one architecture go together as far as ``TOGETHER_BYTES`` go,
    and the low ranks of one weight.
    """
    with workers() as fitting, workers() as finishing:

        def done(numbers: Sequence[int]) -> list[T]:
            return list(finishing.map(finish, numbers, _fitted([problems[number] for number in numbers], sweeps)))

        jobs = [(numbers, fitting.submit(partial(done, numbers))) for numbers in _together(problems)]
        for numbers, job in jobs:
            yield from zip(numbers, job.result(), strict=True)


@torch.no_grad()
def _fitted(problems: Sequence[FitProblem], sweeps: int) -> Sequence[Fitted | None]:
    architecture = problems[0].architecture
    if len(architecture) != 2:
        return [None] * len(problems)
    if family_of(architecture) == "low rank":
        return low_ranks(problems[0].matrix, [each.architecture.inner_features[0] for each in problems], problems[0].gram)
    return cycle_together([each.matrix for each in problems], architecture, [each.gram for each in problems], sweeps=sweeps)


def _together(problems: Sequence[FitProblem]) -> list[list[int]]:
    """The numbers of problems that are worked on together, the first ones first."""
    groups: list[list[int]] = []
    latest: dict[Hashable, tuple[list[int], int]] = {}
    for number, problem in enumerate(problems):
        device = problem.gram.device
        if family_of(problem.architecture) == "low rank":
            key, size = (id(problem.weight), id(problem.gram)), 0
        else:
            key = problem.architecture, device
            size = problem.gram.nbytes + 4 * problem.weight.numel() * problem.gram.itemsize
        group, total = latest.get(key, ([], 0))
        if not group or total + size > TOGETHER_BYTES.get(device.type, 0):
            group, total = [], 0
            groups.append(group)
        group.append(number)
        latest[key] = group, total + size
    return groups
