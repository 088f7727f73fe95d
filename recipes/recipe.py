"""What the recipes that measure share: their options, and measuring, printing and keeping their rows."""

from __future__ import annotations

import argparse
import math
import re
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from flysurgery.bench import Protocol, Record, modes_of
from flysurgery.bench.measuring import one_line
from flysurgery.bench.rows import Job
from flysurgery.cli.app import sentence_if_full
from flysurgery.cli.bench_run import BenchRun, print_records
from flysurgery.cli.options import device_of
from flysurgery.errors import FlysurgeryError, OptionError

Number = TypeVar("Number", int, float)
Item = TypeVar("Item")
Run = Callable[[Tensor], Tensor]

VIT_S = "vit_small_patch16_224"
"""The model that Gonon et al. 2024 measure."""

NEEDS_CUDA = "needs CUDA"
"""The status of what cannot run on a CPU."""


def count(text: str) -> int:
    return _above_zero(text, int)


def counts(text: str) -> tuple[int, ...]:
    return tuple(count(part) for part in text.split(","))


def duration(text: str) -> float:
    return _above_zero(text, float)


def some_of(*known: str) -> Callable[[str], tuple[str, ...]]:
    """What reads known names separated by commas."""

    def read(text: str) -> tuple[str, ...]:
        found = tuple(part.strip() for part in text.split(","))
        for name in found:
            if name not in known:
                raise argparse.ArgumentTypeError(f"there is no '{name}'; choose from {', '.join(known)}")
        return found

    return read


def expression(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"expected a regular expression, got '{text}': {error}") from error


def _above_zero(text: str, kind: type[Number]) -> Number:
    try:
        number = kind(text)
    except ValueError:
        number = kind(0)
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"expected a number above zero, got '{text}'")
    return number


def parser_of(description: str | None) -> argparse.ArgumentParser:
    """A parser whose help is the recipe's docstring as it stands."""
    return argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)


def tables_of(parser: argparse.ArgumentParser) -> Callable[..., argparse.ArgumentParser]:
    """What adds a table to a recipe: its name, the function that measures it, and defaults of ``add_options``."""
    commands = parser.add_subparsers(dest="table", metavar="TABLE", required=True)

    def add(name: str, work: Callable[[argparse.Namespace], object], **defaults: Any) -> argparse.ArgumentParser:
        command = commands.add_parser(name, description=parser.description, formatter_class=argparse.RawDescriptionHelpFormatter)
        add_options(command, **defaults)
        command.set_defaults(work=work)
        return command

    return add


def add_options(parser: argparse.ArgumentParser, *, modes: str | None = None, seconds: float | None = None) -> None:
    """The options that every measuring recipe has; ``--modes`` and ``--seconds`` where there is a default."""
    parser.add_argument("--quick", action="store_true", help="fewer cases and samples, on a CPU of one image: an answer within two minutes")
    parser.add_argument("--device", help="cpu, cuda, ...; by default cuda where there is one")
    parser.add_argument("--threads", type=count, help="CPU threads")
    parser.add_argument("--out", type=Path, help="keep the rows in this CSV file; an interrupted run goes on where it stopped")
    parser.add_argument("--fresh", action="store_true", help="measure all again, and replace the rows in the file")
    parser.add_argument("--seed", type=int, default=0)
    if modes is not None:
        parser.add_argument("--modes", default=modes, help=f"out of fp32, tf32 (CUDA), fp16, bf16, or all; {modes} by default")
    if seconds is not None:
        parser.add_argument("--seconds", type=duration, default=seconds, help="time for the samples of one candidate")


def protocol(options: argparse.Namespace, rounds: int) -> Protocol:
    """Up to ``rounds`` samples of a candidate within ``--seconds``; with ``--quick`` a few, in a tenth of that."""
    if options.quick:
        return Protocol("graph", 5, options.seconds / 10, options.seed)
    return Protocol("graph", rounds, options.seconds, options.seed)


def images(options: argparse.Namespace, device: torch.device, usual: int = 128) -> int:
    """How many images a call has where no option says so: ``usual``, and one with ``--quick`` on a CPU."""
    return 1 if options.quick and device.type == "cpu" else usual


def few(options: argparse.Namespace, items: Iterable[Item], number: int = 1) -> list[Item]:
    """All of them, or with ``--quick`` the first ``number``."""
    return list(items)[: number if options.quick else None]


def device_and_modes(options: argparse.Namespace, *, quick_on_cpu: bool = False) -> tuple[torch.device, tuple[str, ...]]:
    """The device that is meant, and the modes that it has; threads are set.

    With ``quick_on_cpu`` a CPU takes ``--quick`` alone, in float32, and ``--quick`` takes the first mode.
    """
    device = device_of(options.device)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    if quick_on_cpu and device.type != "cuda":
        if not options.quick:
            raise SystemExit("this needs a CUDA device; --quick runs on a CPU too, on few rows and without the kernels")
        return device, ("fp32",)
    modes = modes_of(getattr(options, "modes", "fp32"), device)
    return device, modes[:1] if quick_on_cpu and options.quick else modes


def make(
    options: argparse.Namespace,
    device: torch.device,
    columns: Sequence[str],
    jobs: Iterable[Job],
    *,
    shown: Sequence[str] = (),
    minutes: float | None = None,
    may_fail: tuple[type[Exception], ...] = (torch.OutOfMemoryError,),
    order: Callable[[list[Job]], Iterable[Job]] = iter,
) -> list[Record]:
    """Measure the jobs that have no rows yet, print the columns ``shown`` of all rows, and give the rows.

    No job is begun once ``minutes`` are over. One that fails with one of ``may_fail``, by default for want of a GPU's memory, is
    printed and gets no rows. ``order`` gives the jobs that are to do one after the other, and may prepare them.
    """
    end = math.inf if minutes is None else time.monotonic() + 60 * minutes
    with BenchRun(device, columns, options.out, fresh=options.fresh, plot=getattr(options, "plot", None)) as run:
        known = list(jobs)
        if not known:
            raise OptionError("there is nothing to measure by these options on this device; name others")
        todo = [job for job in known if not run.has(job[0])]
        for done, (head, rows_of) in enumerate(order(todo)):
            name = ", ".join(map(str, head.values()))
            if time.monotonic() > end:
                print(f"{len(todo) - done} of {len(todo)} measurements are left for the next run", flush=True)
                break
            torch.compiler.reset()  # the compiler gives up on code that it has compiled for many models
            try:
                run.add(rows_of(), name)
            except may_fail as error:
                print(f"{name} failed, and has no rows: {one_line(error)}", flush=True)
            torch.cuda.empty_cache()
    if shown:
        print_records(run.records, shown)
    return run.records


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
