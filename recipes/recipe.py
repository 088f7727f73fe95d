"""The engine of the recipes: tables as data, and their options, measuring, printing and keeping of rows.

A recipe that measures is a mapping of names to ``Table``, and ``run(__doc__, TABLES)``.
"""

import argparse
import importlib
import math
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flysurgery.bench import Case, Protocol, Record, in_mode, modes_of, rows_of_case
from flysurgery.bench.measuring import MEASURED
from flysurgery.bench.rows import Job
from flysurgery.bench.timing import all_calls, rotating
from flysurgery.cli.app import sentence_of
from flysurgery.cli.bench import TIMES, bench_run, prepare, record_table
from flysurgery.errors import FlysurgeryError, OptionError, first_line
from flysurgery.inference.clock import between_events

Run = Callable[[Tensor], Tensor]

VIT_S = "vit_small_patch16_224"
"""The model that Gonon et al. 2024 measure."""

NEEDS_CUDA = "needs CUDA"  # the status of what cannot run on a CPU
WINDOW_SECONDS = 1.0  # the shortest window, unless ``--window`` says otherwise: the counter moves in steps of up to a tenth of a second
STUCK_SECONDS = 5.0  # a counter that stands still for so long under load does not count
AHEAD_MS = 20.0
"""At least so much work is launched at a time, one such part ahead of the running one, so that the device never waits: reading the
counter takes some milliseconds."""


@dataclass(frozen=True)
class Place:
    """Where and how cases are measured."""

    device: torch.device
    protocol: Protocol = field(default_factory=Protocol)
    quick: bool = False

    @property
    def on_cuda(self) -> bool:
        return self.device.type == "cuda"

    def kernel(self, run: Run) -> Run | str:
        """A candidate that launches kernels, or why it cannot."""
        return run if self.on_cuda else NEEDS_CUDA


@dataclass(frozen=True)
class Table:
    """A table as data. A case is one combination of ``axes``, with each of ``cases``.

    ``measure`` gets a ``Place``, the columns by name, and ``candidates`` where the table names them. It gives a ``Case`` to be timed, or
    where the table is not ``timed`` rows.
    """

    axes: Mapping[str, tuple[Any, ...]]  # columns and their values; each is an option too, which names other values
    measure: Callable[..., Any]
    timed: bool = True
    cases: Sequence[Record] | Callable[[], Sequence[Record]] = ({},)  # columns whose values are no combination
    quick: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)  # axes with --quick, which takes fp32 unless it says otherwise
    few: int | None = None  # with --quick only so many cases, the first
    columns: tuple[str, ...] = ()  # what ``measure`` says beside the columns above
    candidates: tuple[str, ...] = ()  # what ``--candidates`` may choose from, and its default
    free: tuple[str, ...] = ()  # axes of names whose option takes other names than those of the table
    keep: Callable[[Place, Record], bool] = lambda place, head: True  # whether a combination is a case
    needs_cuda: bool = False  # on a CPU it runs with --quick alone
    joules: bool = False  # are measured without being asked for
    device: str | None = None  # the default of this option and the next
    threads: int | None = None
    seconds: float = 0.5  # for the samples of one candidate
    rounds: int = 15  # samples of one candidate at most
    summary: Callable[[list[Record]], None] | None = None  # prints what all rows say together

    def heads(self, place: Place, **given: tuple[Any, ...]) -> list[Record]:
        """The columns that tell the cases apart; ``given`` are other values of axes."""
        axes = {**self.axes, **(self.quick if place.quick else {}), **given}
        cases = self.cases() if callable(self.cases) else self.cases
        combinations = [dict(zip(axes, values, strict=True)) for values in product(*axes.values())]
        return [head for case in cases for each in combinations if self.keep(place, head := {**case, **each})]


class EnergyMeter:
    """Reads the energy counter of a CUDA device in windows of at least ``seconds``. Raises ``OptionError`` where none can be read."""

    def __init__(self, device: torch.device, seconds: float) -> None:
        self.seconds = seconds
        try:
            self._nvml = importlib.import_module("pynvml")
            self._nvml.nvmlInit()
            uuid = str(torch.cuda.get_device_properties(device).uuid)
            self._handle = self._nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}".encode())
            self.joules()
        except ImportError as error:
            raise OptionError("energy is read through NVML, which needs nvidia-ml-py: pip install 'flysurgery[bench]'") from error
        except Exception as error:  # NVML makes its error classes at run time
            raise OptionError(f"this device has no energy counter that NVML may read: {error}") from error

    def joules(self) -> float:
        return self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle) / 1e3

    def measure(self, run: Run, x: Tensor) -> float:
        """Joules of ``run(x)``, those of the idle device included: the mean power between two steps of the counter, a window apart.

        Inputs are larger together than the L2 cache, and calls are replayed as a graph where they can be captured. The first step is not
        counted: it holds energy of the time before.
        """
        inputs = rotating(x)
        work, _ = all_calls(run, inputs, "graph", None)
        work()
        at_once = max(1, math.ceil(AHEAD_MS / between_events(work, 1)()))
        start = running = ahead = mark()
        launched, steps = 0, list[tuple[float, float]]()
        last, moved = self.joules(), time.perf_counter()
        while len(steps) < 3 or steps[-1][0] - steps[1][0] < self.seconds:
            if running.query():
                for _ in range(at_once):
                    work()
                launched += at_once
                running, ahead = ahead, mark()
            now, joules = time.perf_counter(), self.joules()
            if joules != last:
                steps.append((now, joules))
                last, moved = joules, now
            elif now - moved > STUCK_SECONDS:
                raise OptionError(f"this device's energy counter stood still for {STUCK_SECONDS:.0f} s; nothing can be read from it")
        ahead.synchronize()
        (begin, before), (end, after) = steps[1], steps[-1]
        return (after - before) / (end - begin) * start.elapsed_time(ahead) / launched / len(inputs) / 1e3


def mark() -> torch.cuda.Event:
    """A point in time on the device, behind all that was launched."""
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def run(doc: str | None, tables: Mapping[str, Table]) -> None:
    """The program of a recipe: ask which table, and measure it."""
    main(lambda: measure_table(tables, _parser(doc, tables).parse_args()))


def _parser(doc: str | None, tables: Mapping[str, Table]) -> argparse.ArgumentParser:
    parser = parser_of(doc)
    commands = parser.add_subparsers(dest="table", metavar="TABLE", required=True)
    for name, table in tables.items():
        command = commands.add_parser(name, description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
        add_options(command, seconds=table.seconds, seeded="seed" not in table.axes)
        command.set_defaults(device=table.device, threads=table.threads)
        command.add_argument("--minutes", type=duration, help="begin no case after this many minutes")
        command.add_argument("--only", type=expression, default="", metavar="REGEX", help="the cases in whose columns it is found")
        command.add_argument("--cases", type=stretch, default=slice(None), metavar="FROM:TO:STEP", help="these alone, by their order")
        if table.timed:
            command.add_argument("--joules", action="store_true", default=table.joules, help="measure the joules of a call too")
            command.add_argument("--window", type=duration, default=WINDOW_SECONDS, help="seconds of replays that joules are read over")
        if table.candidates:
            command.add_argument("--candidates", type=listed(str, *table.candidates), help=f"out of {', '.join(table.candidates)}")
        for axis, values in table.axes.items():
            is_count = isinstance(values[0], int) and axis != "seed"
            known = () if axis == "mode" or axis in table.free or isinstance(values[0], int) else values
            reader = listed(count if is_count else type(values[0]), *known)
            usual = ", ".join(map(str, values)).replace("%", "%%")
            command.add_argument(f"--{axis}", type=reader, metavar="VALUE,...", help=f"by default {usual}")
    return parser


def measure_table(tables: Mapping[str, Table], options: argparse.Namespace) -> None:
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
    head, meter = tuple(chosen[0]), None
    extra = {"candidates": options.candidates or table.candidates} if table.candidates else {}
    columns = shown = (*head, *table.columns)
    if table.timed:
        meter = EnergyMeter(device, options.window) if options.joules and place.on_cuda else None
        joules = ("joules",) if options.joules else ()
        columns = (*head, "candidate", *table.columns, *joules, *(name for name in MEASURED if name not in head))
        shown = (*dict.fromkeys((*head, "candidate", *table.columns, *joules, "launch", "weights_gib", *TIMES)),)
    # The first candidate stands for all: others may be launched otherwise, where they cannot be captured.
    first = {"candidate": extra["candidates"][0]} if extra else {}
    jobs = [(head | first, partial(_rows, table, place, head, extra, meter)) for head in chosen]
    may_fail = (torch.OutOfMemoryError,) if table.timed else (FlysurgeryError, RuntimeError)
    records = measure_jobs(options, device, columns, jobs, minutes=options.minutes, may_fail=may_fail)
    print(record_table(records, shown))
    if table.summary is not None:
        table.summary(records)


def name_of(head: Mapping[str, Any]) -> str:
    """How a case is named, and what ``--only`` looks into."""
    return ", ".join(map(str, head.values()))


def _rows(table: Table, place: Place, head: Record, extra: Mapping[str, Any], meter: EnergyMeter | None) -> list[Record]:
    """Check, time and meter the candidates of one case; a baseline's twin is metered again."""
    found = cache(partial(table.measure, place, **head, **extra))
    if not table.timed:
        return [head | row for row in found()]
    rows = rows_of_case(head, found, head["mode"], replace(place.protocol, launch=head.get("launch", "graph")))
    if meter is not None:
        case: Case = found()
        with in_mode(head["mode"]), torch.no_grad():
            for row in rows:
                plain = row["candidate"] if row["candidate"] in case.runs else case.baseline
                run = case.runs[plain]
                row["joules"] = None if isinstance(run, str) or not row["median_ms"] else meter.measure(run, case.input(plain))
    return rows


def measure_jobs(
    options: argparse.Namespace,
    device: torch.device,
    columns: Sequence[str],
    jobs: Iterable[Job],
    *,
    minutes: float | None = None,
    may_fail: tuple[type[Exception], ...],
) -> list[Record]:
    """Measure the jobs that have no rows yet, and give all rows.

    No job is begun once ``minutes`` are over. One that fails with one of ``may_fail`` is printed and gets no rows.
    """
    end = math.inf if minutes is None else time.monotonic() + 60 * minutes
    with bench_run(device, columns, options.out, fresh=options.fresh) as sheet:
        todo = [job for job in jobs if not sheet.rows(job[0])]
        for done, (head, rows_of) in enumerate(todo):
            if time.monotonic() > end:
                print(f"{len(todo) - done} of {len(todo)} measurements are left for the next run", flush=True)
                break
            torch.compiler.reset()  # the compiler gives up on code that it has compiled for many models
            try:
                sheet.add(rows_of(), name_of(head))
            except may_fail as error:
                print(f"{name_of(head)} failed, and has no rows: {first_line(error)}", flush=True)
            torch.cuda.empty_cache()
    return sheet.records


def listed(kind: Callable[[str], Any], *known: str) -> Callable[[str], tuple[Any, ...]]:
    """What reads values of a kind that commas separate, all of them ``known`` where any are."""

    def values(text: str) -> tuple[Any, ...]:
        found = tuple(kind(part.strip()) for part in text.split(","))
        for value in found if known else ():
            if value not in known:
                raise argparse.ArgumentTypeError(f"there is no '{value}'; choose from {', '.join(known)}")
        return found

    return values


def stretch(text: str) -> slice:
    """Read ``FROM:TO`` or ``FROM:TO:STEP``, any of which may be left out."""
    if not re.fullmatch(r"\d*:\d*(:[1-9]\d*)?", text):
        raise argparse.ArgumentTypeError(f"expected FROM:TO or FROM:TO:STEP, got '{text}'")
    return slice(*(int(part) if part else None for part in text.split(":")))


def expression(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"expected a regular expression, got '{text}': {error}") from error


def _above_zero(kind: type[int] | type[float], text: str) -> Any:
    try:
        number = kind(text)
    except ValueError:
        number = 0
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"expected a number above zero, got '{text}'")
    return number


count, duration = partial(_above_zero, int), partial(_above_zero, float)


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


def main(work: Callable[[], None]) -> None:
    """Run a recipe; an error that was raised on purpose, by the file system or for want of memory, is one sentence and an exit code."""
    try:
        work()
    except Exception as error:
        sentence = sentence_of(error)
        if sentence is None:
            raise
        raise SystemExit(" ".join(sentence.split())) from error
    except KeyboardInterrupt:
        raise SystemExit(130) from None
