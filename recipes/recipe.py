"""What the recipes that measure share: their options, and printing, drawing and keeping their rows."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from flysurgery.bench import (
    MODES,
    Ceilings,
    Protocol,
    Record,
    Timing,
    Work,
    check_file,
    check_plot,
    draw_ratios,
    flat,
    measure_ceilings,
    modes_of,
    noise_of,
    status_of,
    take_stamp,
    write_csv,
)
from flysurgery.bench.paper_patterns import ROWS
from flysurgery.cli.bench_run import BenchRun
from flysurgery.cli.bench_show import print_records
from flysurgery.cli.options import device_of
from flysurgery.errors import FlysurgeryError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Number = TypeVar("Number", int, float)

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
    parser.add_argument("--rows", type=count, help=f"{ROWS} by default: 128 images of 196 tokens")
    parser.add_argument("--count", type=count, help=f"how many patterns in all; {usual}")
    parser.add_argument("--minutes", type=duration, default=9.0, help="start no pattern after this time")


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


def table_arguments(description: str | None, *, rows: int | None = None, modes: Sequence[str] = ()) -> argparse.ArgumentParser:
    """A parser for a table of one CUDA device: ``--out``, ``--plot``, and what has a default of ``--rows`` and ``--modes``."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="CSV file to write")
    parser.add_argument("--plot", type=Path, help="draw the rows into files named after this one")
    if rows is not None:
        parser.add_argument("--rows", type=count, default=rows, help=f"rows of x: 128 images of {rows // 128} tokens by default")
    if modes:
        parser.add_argument("--modes", default=",".join(modes), help="out of " + ", ".join(MODES))
    return parser


def need_cuda() -> None:
    """End with one sentence where there is no CUDA device."""
    if not torch.cuda.is_available():
        raise SystemExit("this needs a CUDA device, and PyTorch finds none")


def on_cuda(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """The options, on a machine that can make the table and may write it; ``modes`` are those that there are."""
    options = parser.parse_args()
    need_cuda()
    if options.out is not None:
        check_file(options.out, "--out")
    check_plot(options.plot)
    if isinstance(getattr(options, "modes", None), str):
        options.modes = modes_of(options.modes, torch.device("cuda"))
    return options


@cache
def ceilings(mode: str) -> Ceilings:
    """What the CUDA device reaches in a mode, measured once a run."""
    return measure_ceilings(mode, torch.device("cuda"))


def work_of(moved: int, weights: Iterable[Tensor], rows: int) -> Work:
    """What products with these matrices or factors must spend: ``moved`` bytes of inputs and outputs, weights once."""
    weights = list(weights)
    return Work(moved + sum(each.nbytes for each in weights), 2 * rows * sum(each.numel() for each in weights))


@dataclass(frozen=True)
class Judged:
    """What the time of one candidate is held against: the last columns of the tables of kernels.

    ``bytes_moved`` and ``flops`` are what the computation must spend, ``bound_us`` is what the ceilings of this run allow for it, and
    ``share_of_bound`` the part of the time that this is. ``noise`` is by how much two identical candidates of this run differ, and
    ``status`` says noisy where that is more than ``flysurgery.bench`` lets pass.
    """

    bytes_moved: int
    flops: int
    bound_us: float
    share_of_bound: float
    noise: float | None
    status: str


def judge(mode: str, timings: Mapping[str, Timing], works: Mapping[str, Work], baseline: str = "dense") -> dict[str, Judged]:
    """Hold the times of one run against the work of each candidate, and against that of the ``baseline``, timed twice."""
    noise = noise_of(timings, baseline)
    status = status_of(noise, "cuda", baseline)
    found: dict[str, Judged] = {}
    for name, timing in timings.items():
        bound_ms = ceilings(mode).bound_ms(works[name])
        spent = works[name].bytes_moved, works[name].flops
        found[name] = Judged(*spent, 1e3 * bound_ms, bound_ms / timing.median_ms, noise, status)
    return found


def keep(options: argparse.Namespace, rows: Sequence[DataclassInstance]) -> None:
    """Write all rows so far, with a stamp of now, where ``--out`` names a file."""
    if options.out is not None:
        write_csv(options.out, rows, take_stamp(torch.device("cuda")))


def records_of(rows: Sequence[DataclassInstance]) -> list[Record]:
    """The rows as pictures take them, with the device's name."""
    return [flat(row) | {"device": torch.cuda.get_device_name()} for row in rows]


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
    """Run a recipe; an error that was raised on purpose, or by the file system, is one sentence and an exit code."""
    try:
        work()
    except FlysurgeryError as error:
        raise SystemExit(" ".join(str(error).split())) from error
    except OSError as error:
        raise SystemExit(f"{error.strerror or error}: {error.filename}" if error.filename else str(error)) from error
    except KeyboardInterrupt:
        raise SystemExit(130) from None


def show(run: BenchRun, columns: Sequence[str]) -> None:
    """Print all rows."""
    print_records(run.records, columns)
