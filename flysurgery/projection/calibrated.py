"""From dense matrices to products of factors whose outputs are close on given inputs: one alone, or many side by side."""

from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import TypeVar

import torch
from torch import Tensor

from flysurgery.errors import ProjectionError
from flysurgery.patterns import Architecture, family_of
from flysurgery.projection.block_cycling import SWEEPS, Fitted, cycle_together, low_ranks
from flysurgery.projection.moments import Metric
from flysurgery.projection.project import Projection, as_projection, checked_matrix, product_of, project
from flysurgery.projection.two_factor import two_factor

T = TypeVar("T")

MAX_WORKERS = 8
"""Layers at work at once; each holds several copies of its weight in float64."""

TOGETHER_BYTES = {"cpu": 16 << 20, "cuda": 1 << 30}
"""Of matrices that are worked on together; on a CPU larger ones gain nothing by it, on a GPU small ones keep it waiting."""


@dataclass(frozen=True)
class CalibratedProjection:
    """A projection that was fitted to inputs.

    Attributes:
        projection: the factors, and their error as a matrix, which is larger than that of the plain projection.
        shift: added to the bias, it keeps the mean of the output: ``(W - K_1 K_2) E[x]``; shape (out_features,), float64, None
            where the metric has no mean.
        errors: relative errors ``sqrt(tr(D G Dᵀ) / tr(W G Wᵀ))`` at the start and after each sweep, never rising.
        reason: why the factors are those of the plain projection; None where they are fitted.
    """

    projection: Projection
    shift: Tensor | None
    errors: tuple[float, ...]
    reason: str | None


@torch.no_grad()
def project_calibrated(
    weight: Tensor,  # shape: (out_features, in_features)
    architecture: Architecture,
    metric: Metric,
) -> CalibratedProjection:
    """Find factors of ``architecture`` whose product gives nearly the outputs of ``weight`` on inputs of the given metric.

    Two factors of any patterns are fitted by ``cycle_together``. For any other number there is no method here, so the result is
    the plain projection, with the reason. The work is done in float64 on the metric's device.

    Raises:
        PatternError, ProjectionError: as ``project`` does, and ProjectionError for complex weights.
    """
    if weight.is_complex():
        raise ProjectionError(f"expected a real weight to calibrate, got {weight.dtype}; use project for complex weights")
    matrix = checked_matrix(weight, architecture)
    fitted = None
    if len(architecture) == 2:
        (fitted,) = cycle_together([matrix.to(metric.gram.device)], architecture, [metric.gram])
    return calibrated_projection(weight, architecture, metric, fitted)


@torch.no_grad()
def calibrated_projection(weight: Tensor, architecture: Architecture, metric: Metric, fitted: Fitted | None) -> CalibratedProjection:
    """The result of ``project_calibrated`` for a product that is already fitted to the weight; None unless there are two factors."""
    if fitted is None:
        projection, errors = project(weight, architecture), ()
        reason = f"calibration is for products of two factors, and {architecture} has {len(architecture)}"
    else:
        started = perf_counter() - fitted.seconds
        found = two_factor(fitted.product.cpu(), *architecture)
        projection, errors = as_projection(weight, checked_matrix(weight, architecture), architecture, found, started), fitted.errors
        reason = None
    shift = None
    if metric.mean is not None:
        product = product_of(projection)
        shift = (weight.detach().to(product) - product) @ metric.mean.cpu()
    return CalibratedProjection(projection, shift, errors, reason)


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

    ``gram`` is positive definite and in float64, and lies where the work is done.
    """

    weight: Tensor  # shape: (out_features, in_features)
    architecture: Architecture
    gram: Tensor  # shape: (in_features, in_features)


def fit_side_by_side(
    problems: Sequence[FitProblem], finish: Callable[[int, Fitted | None], T], *, sweeps: int = SWEEPS
) -> Iterator[tuple[int, T]]:
    """Fit each problem by ``cycle_together`` and give its number with what ``finish(number, fitted)`` makes of it, as they are done.

    Without two factors nothing is fitted, and ``fitted`` is None. ``finish`` is called in other threads, several at once, and what it
    raises is raised here. Problems come in their order, but that those of one architecture go together as far as ``TOGETHER_BYTES`` go,
    and the low ranks of one weight.
    """
    with workers() as fitting, workers() as finishing:

        def done(numbers: Sequence[int]) -> list[T]:
            return list(finishing.map(finish, numbers, _fitted([problems[number] for number in numbers], sweeps)))

        jobs = [(numbers, fitting.submit(done, numbers)) for numbers in _together(problems)]
        for numbers, job in jobs:
            yield from zip(numbers, job.result(), strict=True)


@torch.no_grad()
def _fitted(problems: Sequence[FitProblem], sweeps: int) -> Sequence[Fitted | None]:
    architecture, grams = problems[0].architecture, [each.gram for each in problems]
    if len(architecture) != 2:
        return [None] * len(problems)
    if family_of(architecture) == "low rank":
        return low_ranks(problems[0].weight.to(grams[0]), [each.architecture.inner_features[0] for each in problems], grams[0])
    return cycle_together([each.weight.to(each.gram) for each in problems], architecture, grams, sweeps=sweeps)


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
