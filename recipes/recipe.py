"""The engine of the recipes: tables as data, and their options, measuring, printing and keeping of rows.

A recipe that measures is a mapping of names to ``Table``, and ``run(__doc__, TABLES)``.
"""

from __future__ import annotations

import argparse
import math
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any, TypeVar

import torch
from energy import WINDOW_SECONDS, EnergyMeter, with_joules
from torch import Tensor

from flysurgery.bench import Case, Protocol, Record, modes_of, rows_of_case
from flysurgery.bench.measuring import MEASURED
from flysurgery.bench.rows import Job
from flysurgery.cli.app import sentence_if_full
from flysurgery.cli.bench import TIMES
from flysurgery.cli.bench_run import bench_run, prepare, record_table
from flysurgery.errors import FlysurgeryError, OptionError, first_line

Number = TypeVar("Number", int, float)
Run = Callable[[Tensor], Tensor]

VIT_S = "vit_small_patch16_224"
"""The model that Gonon et al. 2024 measure."""

NEEDS_CUDA = "needs CUDA"
"""The status of what cannot run on a CPU."""


@dataclass(frozen=True)
class Place:
    """Where and how cases are measured: a device, a way to time, and whether the run is a quick one."""

    device: torch.device
    protocol: Protocol = field(default_factory=Protocol)
    quick: bool = False

    @property
    def on_cuda(self) -> bool:
        return self.device.type == "cuda"

    def kernel(self, run: Run) -> Run | str:
        """A candidate that launches kernels, or why it cannot."""
        return run if self.on_cuda else NEEDS_CUDA

    def compiled(self, run: Run, mode: str = "default") -> Run | str:
        """A module or function through ``torch.compile``, or why not."""
        return torch.compile(run, mode=mode) if self.on_cuda else "left out on a CPU"


@dataclass(frozen=True)
class Table:
    """A table as data: its cases, and what makes them.

    Args:
        axes: columns and their values. A case is one combination of them. Each is an option too, which names other values.
        make: makes a case ready to be timed, given a ``Place`` and the columns by name, and ``candidates`` where the table names them.
        rows: measures a case that is not timed, given the same; it stands in the place of ``make``.
        cases: columns whose values are no combination of axes, for each case; each is combined with the axes.
        quick: the values of axes with ``--quick``, which takes float32 unless it says otherwise.
        few: with ``--quick`` only so many cases, the first.
        columns: what ``make`` or ``rows`` says beside the columns above.
        candidates: what ``--candidates`` may choose from, and its default.
        free: axes of names whose option takes other names than those of the table.
        keep: whether a combination is a case.
        needs_cuda: on a CPU the table runs with ``--quick`` alone.
        joules: measure joules without being asked to.
        device, threads: the defaults of these options.
        seconds: time for the samples of one candidate.
        rounds: samples of one candidate at most.
        summary: prints what all rows say together.
    """

    axes: Mapping[str, tuple[Any, ...]]
    make: Callable[..., Case] | None = None
    rows: Callable[..., Iterable[Record]] | None = None
    cases: Sequence[Record] | Callable[[], Sequence[Record]] = ({},)
    quick: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    few: int | None = None
    columns: tuple[str, ...] = ()
    candidates: tuple[str, ...] = ()
    free: tuple[str, ...] = ()
    keep: Callable[[Place, Record], bool] = lambda place, head: True
    needs_cuda: bool = False
    joules: bool = False
    device: str | None = None
    threads: int | None = None
    seconds: float = 0.5
    rounds: int = 15
    summary: Callable[[list[Record]], None] | None = None

    def heads(self, place: Place, **given: tuple[Any, ...]) -> list[Record]:
        """The columns that tell the cases apart; ``given`` are other values of axes."""
        axes = {**self.axes, **(self.quick if place.quick else {}), **given}
        cases = self.cases() if callable(self.cases) else self.cases
        combinations = [dict(zip(axes, values, strict=True)) for values in product(*axes.values())]
        return [head for case in cases for each in combinations if self.keep(place, head := {**case, **each})]


def run(doc: str | None, tables: Mapping[str, Table]) -> None:
    """The program of a recipe: ask which table, and measure it."""
    main(partial(_run, doc, tables))


def _run(doc: str | None, tables: Mapping[str, Table]) -> None:
    parser = parser_of(doc)
    commands = parser.add_subparsers(dest="table", metavar="TABLE", required=True)
    for name, table in tables.items():
        command = commands.add_parser(name, description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
        add_options(command, seconds=table.seconds, seeded="seed" not in table.axes)
        command.set_defaults(device=table.device, threads=table.threads)
        command.add_argument("--minutes", type=duration, help="begin no case after this many minutes")
        command.add_argument("--only", type=expression, default="", metavar="REGEX", help="the cases in whose columns it is found")
        command.add_argument("--cases", type=stretch, default=slice(None), metavar="FROM:TO:STEP", help="these alone, by their order")
        if table.make is not None:
            command.add_argument("--joules", action="store_true", default=table.joules, help="measure the joules of a call too")
            command.add_argument("--window", type=duration, default=WINDOW_SECONDS, help="seconds of replays that joules are read over")
        if table.candidates:
            command.add_argument("--candidates", type=some_of(*table.candidates), help=f"out of {', '.join(table.candidates)}")
        for axis, values in table.axes.items():
            usual = ", ".join(map(str, values))
            command.add_argument(f"--{axis}", type=_reader(axis, table), metavar="VALUE,...", help=f"by default {usual}".replace("%", "%%"))
    measure_table(tables, parser.parse_args())


def _reader(axis: str, table: Table) -> Callable[[str], tuple[Any, ...]]:
    """What reads other values of an axis: numbers, the names that the table has, or any names."""
    values = table.axes[axis]
    if axis == "mode" or axis in table.free:
        return listed(str)
    if axis == "seed":
        return listed(int)
    if isinstance(values[0], int):
        return listed(count)
    return some_of(*values)


def measure_table(tables: Mapping[str, Table], options: argparse.Namespace) -> list[Record]:
    """Measure the cases of a table that have no rows yet, and print all its rows."""
    table = tables[options.table]
    device = prepare(options.device, options.threads)
    if table.needs_cuda and device.type != "cuda" and not options.quick:
        raise SystemExit("this needs a CUDA device; --quick runs on a CPU too, on few cases and without the kernels")
    seconds, rounds = (options.seconds / 10, 5) if options.quick else (options.seconds, table.rounds)
    place = Place(device, Protocol("graph", rounds, seconds, 0 if "seed" in table.axes else options.seed), options.quick)
    given = {axis: values for axis in table.axes if (values := getattr(options, axis)) is not None}
    if "mode" in table.axes:
        usual = table.quick.get("mode", ("fp32",)) if options.quick else table.axes["mode"]
        given["mode"] = modes_of(",".join(options.mode or usual), device)
    known = table.heads(place, **given)
    chosen = [head for head in known if options.only.search(name_of(head))][options.cases][: table.few if place.quick else None]
    if not chosen:
        cases = "; ".join(name_of(head) for head in known[:20])
        raise OptionError(f"there is nothing to measure by these options on this device; cases are {cases or 'none'}")
    head, extra = tuple(chosen[0]), {}
    if table.candidates:
        extra["candidates"] = options.candidates or table.candidates
    if table.make is None:
        columns = shown = (*head, *table.columns)
        jobs = [(head, partial(_untimed, table, place, head, extra)) for head in chosen]
    else:
        meter = EnergyMeter(device, options.window) if options.joules and place.on_cuda else None
        joules = ("joules",) if options.joules else ()
        columns = (*head, "candidate", *table.columns, *joules, *(name for name in MEASURED if name not in head))
        shown = (*dict.fromkeys((*head, "candidate", *table.columns, *joules, "launch", "weights_gib", *TIMES)),)
        # The first candidate stands for all: others may be launched otherwise, where they cannot be captured.
        first = {"candidate": extra["candidates"][0]} if extra else {}
        jobs = [(head | first, partial(_timed, table, place, head, extra, meter)) for head in chosen]
    may_fail = (torch.OutOfMemoryError,) if table.make else (FlysurgeryError, RuntimeError)
    records = make(options, device, columns, jobs, shown=shown, minutes=options.minutes, may_fail=may_fail)
    if table.summary is not None:
        table.summary(records)
    return records


def name_of(head: Mapping[str, Any]) -> str:
    """How a case is named, and what ``--only`` looks into."""
    return ", ".join(map(str, head.values()))


def _untimed(table: Table, place: Place, head: Record, extra: Mapping[str, Any]) -> Iterable[Record]:
    assert table.rows is not None
    return [head | row for row in table.rows(place, **head, **extra)]


def _timed(table: Table, place: Place, head: Record, extra: Mapping[str, Any], meter: EnergyMeter | None) -> list[Record]:
    """Check, time and meter the candidates of one case."""
    assert table.make is not None
    ready = cache(partial(table.make, place, **head, **extra))
    protocol = Protocol(head.get("launch", "graph"), place.protocol.rounds, place.protocol.seconds, place.protocol.seed)
    rows = rows_of_case(head, ready, head["mode"], protocol)
    return rows if meter is None else with_joules(rows, ready(), head["mode"], meter)


def listed(kind: Callable[[str], Any]) -> Callable[[str], tuple[Any, ...]]:
    """What reads values of a kind that commas separate."""

    def values(text: str) -> tuple[Any, ...]:
        return tuple(kind(part.strip()) for part in text.split(","))

    return values


def stretch(text: str) -> slice:
    """Read ``FROM:TO`` or ``FROM:TO:STEP``, any of which may be left out."""
    if not re.fullmatch(r"\d*:\d*(:[1-9]\d*)?", text):
        raise argparse.ArgumentTypeError(f"expected FROM:TO or FROM:TO:STEP, got '{text}'")
    return slice(*(int(part) if part else None for part in text.split(":")))


def some_of(*known: str) -> Callable[[str], tuple[str, ...]]:
    """What reads known names separated by commas."""

    def known_name(name: str) -> str:
        if name not in known:
            raise argparse.ArgumentTypeError(f"there is no '{name}'; choose from {', '.join(known)}")
        return name

    return listed(known_name)


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


count, duration = partial(_above_zero, kind=int), partial(_above_zero, kind=float)


def parser_of(description: str | None) -> argparse.ArgumentParser:
    """A parser whose help is the recipe's docstring as it stands."""
    return argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)


def add_options(parser: argparse.ArgumentParser, *, seconds: float, seeded: bool = True) -> None:
    """The options that every measuring recipe has; ``seconds`` is the default of ``--seconds``. Without ``seeded`` it has its own seeds."""
    parser.add_argument("--quick", action="store_true", help="fewer cases and samples: an answer within two minutes, on a CPU too")
    parser.add_argument("--device", help="cpu, cuda, ...; by default cuda where there is one")
    parser.add_argument("--threads", type=count, help="CPU threads")
    parser.add_argument("--out", type=Path, help="keep the rows in this CSV file; an interrupted run goes on where it stopped")
    parser.add_argument("--fresh", action="store_true", help="measure all again, and replace the rows in the file")
    if seeded:
        parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=duration, default=seconds, help="time for the samples of one candidate")


def make(
    options: argparse.Namespace,
    device: torch.device,
    columns: Sequence[str],
    jobs: Iterable[Job],
    *,
    shown: Sequence[str] = (),
    minutes: float | None = None,
    may_fail: tuple[type[Exception], ...] = (torch.OutOfMemoryError,),
) -> list[Record]:
    """Measure the jobs that have no rows yet, print the columns ``shown`` of all rows, and give the rows.

    No job is begun once ``minutes`` are over. One that fails with one of ``may_fail``, by default for want of a GPU's memory, is
    printed and gets no rows.
    """
    end = math.inf if minutes is None else time.monotonic() + 60 * minutes
    with bench_run(device, columns, options.out, fresh=options.fresh) as run:
        todo = [job for job in jobs if not run.rows(job[0])]
        for done, (head, rows_of) in enumerate(todo):
            if time.monotonic() > end:
                print(f"{len(todo) - done} of {len(todo)} measurements are left for the next run", flush=True)
                break
            torch.compiler.reset()  # the compiler gives up on code that it has compiled for many models
            try:
                run.add(rows_of(), name_of(head))
            except may_fail as error:
                print(f"{name_of(head)} failed, and has no rows: {first_line(error)}", flush=True)
            torch.cuda.empty_cache()
    if shown:
        print(record_table(run.records, shown))
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
