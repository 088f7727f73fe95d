"""The engine of the tables of kernels and of whole models: candidates checked and timed in one run, printed, drawn and kept."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import recipe
import torch
from recipe import Run
from torch import Tensor

from flysurgery.bench import Ceilings, Measured, Protocol, Record, Work, draw_ratios, in_mode, measure, measure_ceilings
from flysurgery.bench.rows import columns_of
from flysurgery.bench.variants import forget_compiled
from flysurgery.cli.options import device_of

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Item = TypeVar("Item")

NEEDS_CUDA = "needs CUDA"
"""The status of kernels on a CPU."""

UNSEEN = ("config", "launches", "iqr_us", "bytes_moved", "flops")
"""Columns that are written, and not printed."""


@dataclass(frozen=True)
class Times:
    """The time of one candidate; None where the last column says why.

    ``launch`` is how it was launched, as in ``flysurgery.bench.Measured``: what cannot be captured is launched from Python.
    ``error`` is relative to float64, in the Frobenius norm; of a block with its residual, relative to its change of x.
    """

    launch: str
    error: float | None
    median_us: float | None
    iqr_us: float | None


@dataclass(frozen=True)
class Judged:
    """What the time of one candidate is held against: the last columns of a row.

    ``bytes_moved`` and ``flops`` are what the computation must spend, ``bound_us`` is what the ceilings of this run allow for it, and
    ``share_of_bound`` the part of the time that this is. ``noise`` is by how much two identical candidates of this run differ, and
    ``status`` says noisy where that is more than ``flysurgery.bench`` lets pass, or why there is no time.
    """

    bytes_moved: int | None
    flops: int | None
    bound_us: float | None
    share_of_bound: float | None
    noise: float | None
    status: str


def cells(measured: Measured, *bases: Measured) -> tuple[Any, ...]:
    """The last columns of a row: its ``Times``, its ratio to each of the ``bases``, its ``Judged``."""

    def over(base: Measured) -> float | None:
        return measured.median_ms / base.median_ms if measured.median_ms and base.median_ms else None

    def us(ms: float | None) -> float | None:
        return None if ms is None else 1e3 * ms

    spent = measured.bytes_moved, measured.flops, us(measured.bound_ms), measured.share_of_bound
    times = Times(measured.launch, measured.error, us(measured.median_ms), us(measured.iqr_ms))
    return times, *map(over, bases), Judged(*spent, measured.noise, measured.status)


def work_of(moved: int, weights: Iterable[Tensor], rows: int) -> Work:
    """What products with these matrices or factors must spend: ``moved`` bytes of inputs and outputs, weights once."""
    weights = list(weights)
    return Work(moved + sum(each.nbytes for each in weights), 2 * rows * sum(each.numel() for each in weights))


@cache
def ceilings(mode: str, device: torch.device, *, quick: bool) -> Ceilings:
    """What the device reaches in a mode, measured once a run."""
    return measure_ceilings(mode, device, quick=quick)


@dataclass(frozen=True)
class Table:
    """On which device, in which modes and how the rows of a table are measured.

    With ``--quick`` it has one mode and the first cases. A CPU takes it with ``--quick`` alone, in float32: there what launches kernels
    gets a row that says so, and the others are timed on the rows of one image.
    """

    options: argparse.Namespace
    device: torch.device
    modes: tuple[str, ...]
    protocol: Protocol

    @property
    def on_cuda(self) -> bool:
        """Whether kernels can run."""
        return self.device.type == "cuda"

    def few(self, items: Iterable[Item], count: int = 1) -> list[Item]:
        """All of them, or with ``--quick`` the first ``count``."""
        return list(items)[: count if self.options.quick else None]

    def rows(self, tokens: int) -> int:
        """Rows of x, where no option says so the tokens of 128 images, or of one."""
        return getattr(self.options, "rows", None) or recipe.images(self.options, self.device) * tokens

    def kernel(self, run: Run) -> Run | str:
        """A candidate that launches kernels, or why it cannot."""
        return run if self.on_cuda else NEEDS_CUDA

    def compiled(self, run: Run, mode: str = "default") -> Run | str:
        """A module or function through ``torch.compile``, or why not."""
        return torch.compile(run, mode=mode) if self.on_cuda else "left out on a CPU"

    def measure(
        self,
        mode: str,
        candidates: Mapping[str, Run | str],
        x: Tensor,
        truths: Tensor | Mapping[str, Tensor],
        works: Work | Mapping[str, Work],
        *,
        baseline: str = "dense",
        worst: float = 2.0,
        base: Tensor | None = None,
        rows: Sequence[int] | None = None,
    ) -> dict[str, Measured]:
        """Check and time candidates as ``flysurgery.bench.measure`` does; of those that cannot run here there is the reason."""
        runs = {name: run for name, run in candidates.items() if not isinstance(run, str)}
        refused = {name: run for name, run in candidates.items() if isinstance(run, str)}
        given: dict[str, Any] = {"baseline": baseline, "worst": worst, "base": base, "rows": rows, "refused": refused, "works": works}
        with in_mode(mode), torch.inference_mode():
            found = measure(runs, x, truths, ceilings=self.ceilings(mode), protocol=self.protocol, **given)
        return {name: found[name] for name in dict.fromkeys((*candidates, *found))}

    def copy(self, mode: str, bytes_moved: int) -> Measured:
        """A copy that moves so many bytes."""
        block = torch.ones(bytes_moved // 2, dtype=torch.uint8, device=self.device)
        return self.measure(mode, {"copy": torch.clone}, block, block[:1].double(), Work(bytes_moved, 0), baseline="copy", rows=[0])["copy"]

    def ceilings(self, mode: str) -> Ceilings:
        """What the device reaches in a mode."""
        return ceilings(mode, self.device, quick=self.options.quick)

    def make(
        self,
        kind: type[DataclassInstance],
        cases: Sequence[Mapping[str, Any]],
        rows_of: Callable[..., Sequence[DataclassInstance]],
        prepare: Callable[[Sequence[Mapping[str, Any]]], None] | None = None,
    ) -> list[Record]:
        """Measure the cases that have no rows yet, each by ``rows_of(**case)``, and print; gives all rows.

        ``cases`` are the columns that tell one case from the others. ``prepare`` gets those to measure before the first of them, on CUDA.
        """

        def measured(case: Mapping[str, Any]) -> Sequence[DataclassInstance]:
            torch.manual_seed(self.options.seed)
            forget_compiled()
            rows = rows_of(**case)
            torch.cuda.empty_cache()
            return rows

        def ready(jobs: list[recipe.Job]) -> list[recipe.Job]:
            for mode in self.modes if jobs else ():
                self.ceilings(mode)  # before a graph that cannot be captured leaves CUDA's generator unusable
            if prepare is not None and self.on_cuda and jobs:
                prepare([case for case, _ in jobs])
            return jobs

        columns = [name for name in columns_of(kind) if name not in UNSEEN]
        return recipe.make(self.options, self.device, kind, [(case, partial(measured, case)) for case in cases], columns, order=ready)


def table_of(options: argparse.Namespace) -> Table:
    """The table that the command line asks for, on a device that can make it."""
    if device_of(options.device).type != "cuda":
        if not options.quick:
            raise SystemExit("this needs a CUDA device; --quick runs on a CPU too, on few rows and without the kernels")
        options.modes = "fp32"
    device, modes = recipe.device_and_modes(options)
    return Table(options, device, modes[:1] if options.quick else modes, recipe.protocol(options, 15))


def draw(
    plot: Path | None,
    records: Sequence[Record],
    *,
    group: Sequence[str],
    ratio: str = "ratio_to_dense",
    series: str = "candidate",
    by: str = "mode",
) -> None:
    """Bars of a ratio for each candidate, one picture for each value of the column ``by``, named after it; none without ``plot``."""
    if plot is None:
        return
    for value in dict.fromkeys(record[by] for record in records):
        own = [record for record in records if record[by] == value]
        draw_ratios(own, recipe.of_mode(plot, str(value)), group=group, ratio=ratio, series=series, title=f"{own[0]['device']}, {value}")
