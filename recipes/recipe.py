"""What the recipes that measure share: their options, and printing, drawing and keeping their rows."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from flysurgery.bench import (
    Ceilings,
    Measured,
    Protocol,
    Record,
    Work,
    draw_ratios,
    in_mode,
    measure,
    measure_ceilings,
    modes_of,
)
from flysurgery.bench.compiled import forget_compiled
from flysurgery.bench.paper_patterns import ROWS
from flysurgery.bench.rows import columns_of
from flysurgery.cli.bench_run import BenchRun
from flysurgery.cli.bench_show import print_records
from flysurgery.cli.memory import sentence_if_full
from flysurgery.cli.options import device_of
from flysurgery.errors import FlysurgeryError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Number = TypeVar("Number", int, float)
Item = TypeVar("Item")
Run = Callable[[Tensor], Tensor]

NEEDS_CUDA = "needs CUDA"
"""The status of kernels on a CPU."""

UNSEEN = ("config", "launches", "iqr_us", "bytes_moved", "flops")
"""Columns of the tables of kernels that are written, and not printed."""

VIT_S = "vit_small_patch16_224"
"""The model that Gonon et al. 2024 measure."""


def count(text: str) -> int:
    """A whole number above zero, as an option takes it."""
    return _above_zero(text, int)


def counts(text: str) -> tuple[int, ...]:
    """Whole numbers above zero, separated by commas."""
    return tuple(count(part) for part in text.split(","))


def duration(text: str) -> float:
    """A time above zero, as an option takes it."""
    return _above_zero(text, float)


def _above_zero(text: str, kind: type[Number]) -> Number:
    try:
        number = kind(text)
    except ValueError:
        number = kind(0)
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"expected a number above zero, got '{text}'")
    return number


def arguments(description: str | None, *, modes: str | None = None, seconds: float | None = None) -> argparse.ArgumentParser:
    """A parser with the options that every measuring recipe has; ``--modes`` and ``--seconds`` where there is a default."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer cases and samples, on a CPU of one image: an answer within two minutes")
    parser.add_argument("--device", help="cpu, cuda, ...; by default cuda where there is one")
    parser.add_argument("--threads", type=count, help="CPU threads")
    parser.add_argument("--out", type=Path, help="keep the rows in this CSV file; an interrupted run goes on where it stopped")
    parser.add_argument("--fresh", action="store_true", help="measure all again, and replace the rows in the file")
    parser.add_argument("--plot", type=Path, help="draw the rows into this file, or into one for each mode, named after it")
    parser.add_argument("--seed", type=int, default=0)
    if modes is not None:
        parser.add_argument("--modes", default=modes, help="out of fp32, tf32 (CUDA), fp16, bf16, or all")
    if seconds is not None:
        parser.add_argument("--seconds", type=duration, default=seconds, help="time for the samples of one candidate")
    return parser


def add_model(parser: argparse.ArgumentParser) -> None:
    """The options of a recipe that takes a model apart."""
    parser.add_argument("--model", default=VIT_S, help="a ViT of timm: vit_base_patch16_224, vit_large_patch16_224, ...")
    parser.add_argument("--model-args", action="append", metavar="KEY=VALUE", help="arguments of its constructor; repeatable")
    parser.add_argument("--protocols", default="paper,today", help="out of paper, today")


def add_patterns(parser: argparse.ArgumentParser, usual: str) -> None:
    """The options of a recipe that goes through patterns for as long as told; ``usual``: how many they are without ``--count``."""
    add_rows(parser, ROWS // 128)
    parser.add_argument("--count", type=count, help=f"how many patterns in all; {usual}")
    parser.add_argument("--minutes", type=duration, default=9.0, help="start no pattern after this time")


def add_rows(parser: argparse.ArgumentParser, tokens: int) -> None:
    """The option for the rows of x, which are those of 128 images if it is not used."""
    parser.add_argument("--rows", type=count, help=f"{128 * tokens} by default: 128 images of {tokens} tokens")


def protocol(options: argparse.Namespace, rounds: int) -> Protocol:
    """Up to ``rounds`` samples of a candidate within ``--seconds``; with ``--quick`` a few, in a tenth of that."""
    if options.quick:
        return Protocol("graph", 5, options.seconds / 10, options.seed)
    return Protocol("graph", rounds, options.seconds, options.seed)


def images(options: argparse.Namespace, device: torch.device, usual: int = 128) -> int:
    """How many images a call has where no option says so: ``usual``, and one with ``--quick`` on a CPU."""
    return 1 if options.quick and device.type == "cpu" else usual


def of_mode(plot: Path, mode: str) -> Path:
    """Where the picture of one mode goes: ``table.png`` becomes ``table.fp32.png``."""
    return plot.with_name(f"{plot.stem}.{mode}{plot.suffix}")


def need_cuda() -> None:
    """End with one sentence where there is no CUDA device."""
    if not torch.cuda.is_available():
        raise SystemExit("this needs a CUDA device, and PyTorch finds none")


def work_of(moved: int, weights: Iterable[Tensor], rows: int) -> Work:
    """What products with these matrices or factors must spend: ``moved`` bytes of inputs and outputs, weights once."""
    weights = list(weights)
    return Work(moved + sum(each.nbytes for each in weights), 2 * rows * sum(each.numel() for each in weights))


@dataclass(frozen=True)
class Times:
    """The time of one candidate in the tables of kernels; None where the last column says why.

    ``launch`` is how it was launched, as in ``flysurgery.bench.Measured``: what cannot be captured is launched from Python.
    ``error`` is relative to float64, in the Frobenius norm; of a block with its residual, relative to its change of x.
    """

    launch: str
    error: float | None
    median_us: float | None
    iqr_us: float | None


@dataclass(frozen=True)
class Judged:
    """What the time of one candidate is held against: the last columns of the tables of kernels.

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


@cache
def ceilings(mode: str, device: torch.device, *, quick: bool) -> Ceilings:
    """What the device reaches in a mode, measured once a run."""
    return measure_ceilings(mode, device, quick=quick)


@dataclass(frozen=True)
class Table:
    """A table of kernels: on which device, in which modes and how its rows are measured.

    With ``--quick`` it has one mode and the first sizes. A CPU takes it with ``--quick`` alone, in float32: there what launches kernels
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

    def few(self, items: Iterable[Item]) -> list[Item]:
        """All of them, or with ``--quick`` the first."""
        return list(items)[: 1 if self.options.quick else None]

    def rows(self, tokens: int) -> int:
        """Rows of x, where no option says so the tokens of 128 images, or of one."""
        return getattr(self.options, "rows", None) or images(self.options, self.device) * tokens

    def kernel(self, run: Run) -> Run | str:
        """A candidate that launches kernels, or why it cannot."""
        return run if self.on_cuda else NEEDS_CUDA

    def compiled(self, module: nn.Module, mode: str = "default") -> Run | str:
        """A module through ``torch.compile``, or why not."""
        return torch.compile(module, mode=mode) if self.on_cuda else "left out on a CPU"

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
        draw: Callable[[Sequence[Record], Path], None],
        prepare: Callable[[Sequence[Mapping[str, Any]]], None] | None = None,
    ) -> list[Record]:
        """Measure the cases that have no rows yet, each by ``rows_of(self, **case)``, print and draw; gives all rows.

        ``cases`` are the columns that tell one case from the others. ``prepare`` gets those to measure before the first of them, on CUDA.
        """
        with start(self.options, self.device, kind) as run:
            todo = [case for case in cases if not run.has(case)]
            for mode in self.modes if todo else ():
                self.ceilings(mode)  # before a graph that cannot be captured leaves CUDA's generator unusable
            if prepare is not None and self.on_cuda and todo:
                prepare(todo)
            for case in todo:
                torch.manual_seed(self.options.seed)
                forget_compiled()
                run.add(rows_of(self, **case), ", ".join(map(str, case.values())))
                torch.cuda.empty_cache()
        show(run, [name for name in columns_of(kind) if name not in UNSEEN])
        if self.options.plot is not None and run.records:
            draw(run.records, self.options.plot)
        return run.records


def table_of(parser: argparse.ArgumentParser) -> Table:
    """The table that the command line asks for, on a device that can make it."""
    options = parser.parse_args()
    if device_of(options.device).type != "cuda":
        if not options.quick:
            raise SystemExit("this needs a CUDA device; --quick runs on a CPU too, on few rows and without the kernels")
        options.modes = "fp32"
    device, modes = device_and_modes(options)
    return Table(options, device, modes[:1] if options.quick else modes, protocol(options, 15))


def draw(
    plot: Path,
    records: Sequence[Record],
    *,
    group: Sequence[str],
    ratio: str = "ratio_to_dense",
    series: str = "candidate",
    by: str = "mode",
) -> None:
    """Bars of a ratio for each candidate, one picture for each value of the column ``by``, named after it."""
    for value in dict.fromkeys(record[by] for record in records):
        own = [record for record in records if record[by] == value]
        draw_ratios(own, of_mode(plot, str(value)), group=group, ratio=ratio, series=series, title=f"{own[0]['device']}, {value}")


def device_and_modes(options: argparse.Namespace) -> tuple[torch.device, tuple[str, ...]]:
    """The device that is meant, and the modes that it has; threads are set."""
    device = device_of(options.device)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    return device, modes_of(getattr(options, "modes", "fp32"), device)


def start(options: argparse.Namespace, device: torch.device, kind: type[DataclassInstance]) -> BenchRun:
    """The run, with the rows of the class ``kind`` of an interrupted one."""
    return BenchRun(device, kind, options.out, fresh=options.fresh, plot=options.plot)


def main(work: Callable[[], None]) -> None:
    """Run a recipe; an error that was raised on purpose, by the file system or for want of memory, is one sentence and an exit code."""
    try:
        work()
    except FlysurgeryError as error:
        raise SystemExit(" ".join(str(error).split())) from error
    except OSError as error:
        raise SystemExit(f"{error.strerror or error}: {error.filename}" if error.filename else str(error)) from error
    except RuntimeError as error:
        sentence = sentence_if_full(error)
        if sentence is None:
            raise
        raise SystemExit(sentence) from error
    except KeyboardInterrupt:
        raise SystemExit(130) from None


def show(run: BenchRun, columns: Sequence[str]) -> None:
    """Print all rows."""
    print_records(run.records, columns)
