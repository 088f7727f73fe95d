"""Check that a change keeps the project's main times and errors.

    git worktree add --detach build/base COMMIT && python recipes/gate.py --base build/base --save gate.csv    # the main use
    python recipes/gate.py --save now.csv           # this checkout alone
    python recipes/gate.py --cpu --base build/base  # whole models on two threads of the CPU

Needs a CUDA device and at most two minutes for each checkout, once its kernels are compiled. Each checkout is measured by its own
``recipes/gate.py`` in a process of its own. With ``--base`` both processes hold the same case and take turns, so a change of the
device's clocks meets both. Times are medians, by CUDA graphs over inputs larger than the L2 cache. ``reference`` is the faster of
the ways of PyTorch's own that are timed beside a candidate: the dense module, einsum.

A row fails if its time grew by more than 3 % (on a CPU 10 %) and its noise. Noise is the larger of two numbers: the spread of a side's
turns, and the difference between the two sides' times of the reference, which both run alike. It counts up to the same 3 % or 10 %.
A row fails too if its error against float64 is more than 2 times (fp32, tf32, training) or 1.06 times (fp16, bf16) that of the reference,
if it cannot run, or if it is gone.
The exit code is 1 if a row fails. ``--quick`` measures tiny cases, on a CPU too, to see that everything runs.
"""

import argparse
import gc
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import Any

import recipe
import torch
from recipe import VIT_S, Place, Run
from torch import nn
from vits import part_case, training_case

from flysurgery.bench import Case, Protocol, Record, in_mode, measure, take_stamp
from flysurgery.bench.measuring import NOISE, checked_rows
from flysurgery.bench.rows import STAMP, as_csv, cell, check_file, replace_text
from flysurgery.errors import FlysurgeryError, OptionError, first_line
from flysurgery.factors import factors_to_dense, ks_einsum
from flysurgery.layers import ButterflyLinear
from flysurgery.patterns import Architecture, Pattern
from flysurgery.tables import text_table

STEP, FACTOR = "training step", "factor"
PROTOCOL = Protocol("graph", 15, 0.15)  # one turn of one case: at most 15 samples of each candidate, in 0.15 s
DENSE_ENTRIES = 1 << 20  # a factor of at most so many entries, zeros included, is timed as a dense matrix too
ROW = ("case", "candidate", "status", "launch", "ms", "noise", "reference", "reference_ms", "ratio", "error", "most_error", "tolerance")
"""``ratio`` is a time over the reference's, ``most_error`` what an error may be, ``tolerance`` the share by which a time may grow, and
``noise`` that by which it differs between turns."""


@dataclass(frozen=True)
class Entry:
    """What is measured: ``part`` is a part of ``vit_units.parts``, ``STEP`` or ``FACTOR``; each of ``own`` gets a row.

    ``batch`` counts samples. ``arch`` is a family of architectures, or of a factor its pattern.
    """

    part: str
    mode: str
    batch: int = 128
    arch: str = "gonon"
    model: str = VIT_S
    own: tuple[str, ...] = ("optimized",)

    @property
    def name(self) -> str:  # by which rows of two checkouts are matched
        return f"{'' if self.part == FACTOR else f'{self.model} '}{self.part} {self.arch}, {self.mode}, {self.batch}"

    @property
    def worst(self) -> float:  # how many times the reference's error its own may be
        return 1.06 if self.mode in ("fp16", "bf16") and self.part != STEP else 2.0

    def case(self, device: torch.device, dtype: torch.dtype) -> Case:
        """Its own candidates and PyTorch's. No baseline is named, so that none is timed twice: noise is seen between turns."""
        how: dict[str, Any] = {"model": self.model, "arch": self.arch, "batch": self.batch, "mode": self.mode}
        if self.part == FACTOR:
            case = factor_case(self, device, dtype)
        elif self.part == STEP:
            case = training_case(Place(device), **how)
        else:
            with torch.no_grad():
                candidates = (*self.own, "dense")
                case = part_case(Place(device), **how, protocol="today", unit=self.part, candidates=candidates, checked=4)
        base = case.input("dense")[list(case.rows or ())] if self.part == "FFN" else None
        return replace(case, baseline="", worst=math.inf, base=base)


PATTERNS = ("1,64,64,8", "2,96,96,4", "4,128,128,4", "12,64,64,4")
GPU = (
    Entry("model", "fp16", own=("optimized", "dense optimized")),
    *(Entry("model", mode) for mode in ("bf16", "tf32", "fp32")),
    Entry("model", "fp16", arch="monarch"),
    Entry("model", "fp16", model="vit_base_patch16_224"),
    *(Entry("model", "fp16", batch=images) for images in (1, 2, 8)),
    *(Entry("FFN", "fp16", arch=arch) for arch in ("gonon", "monarch")),
    Entry(STEP, "bf16", own=("converted",)),
    *(Entry(FACTOR, mode, 128 * 196, pattern, own=("layer",)) for mode in ("fp32", "fp16") for pattern in PATTERNS),
)
CPU = tuple(Entry("model", "fp32", 16, arch, own=("converted",)) for arch in ("gonon", "monarch"))
QUICK = (
    Entry("model", "fp32", 2, "monarch", "test_vit", ("optimized", "converted", "dense optimized")),
    Entry("FFN", "fp32", 2, "monarch", "test_vit"),
    Entry(STEP, "bf16", 2, "monarch", "test_vit", ("converted",)),
    Entry(FACTOR, "fp32", 40, "2,8,4,3", own=("layer",)),
)


def factor_case(entry: Entry, device: torch.device, dtype: torch.dtype) -> Case:
    pattern = Pattern(*map(int, entry.arch.split(",")))
    layer = ButterflyLinear(Architecture((pattern,)), bias=False).to(device, dtype).requires_grad_(False)
    factor = layer.factors[0]
    x = torch.randn(entry.batch, pattern.in_features).to(device, dtype)
    rows = checked_rows(entry.batch, 128)
    runs: dict[str, Run] = {entry.own[0]: layer, "einsum": lambda x: ks_einsum(x, factor)}
    if pattern.in_features * pattern.out_features <= DENSE_ENTRIES:
        weight = factors_to_dense([factor.double()]).to(dtype)
        runs["dense"] = lambda x: nn.functional.linear(x, weight)
    return Case(runs, x, ks_einsum(x[rows].double(), factor.double()), rows)


def turn(entry: Entry, case: Case) -> list[Record]:
    with torch.no_grad():
        found = measure(case, PROTOCOL)
    references = [name for name in case.runs if name not in entry.own]
    timed = {name: ms for name in references if (ms := found[name].median_ms) is not None}
    if not timed:
        statuses = ", ".join(found[name].status for name in references)
        return [_row(entry, own, f"not compared with PyTorch: {statuses}") for own in entry.own]
    reference, reference_ms = min(timed.items(), key=lambda item: item[1])
    most_error = entry.worst * max(found[name].error or 0.0 for name in timed)
    rows = []
    for name in entry.own:
        own = found[name]
        ratio = None if own.median_ms is None else own.median_ms / reference_ms
        times = {"launch": own.launch, "ms": own.median_ms, "reference": reference, "reference_ms": reference_ms, "ratio": ratio}
        rows.append(_row(entry, name, own.status, **times, error=own.error, most_error=most_error, tolerance=NOISE[case.device.type]))
    return rows


def _row(entry: Entry, candidate: str, status: str, **numbers: Any) -> Record:
    return dict.fromkeys(ROW) | {"case": entry.name, "candidate": candidate, "status": status, **numbers}


def work(entries: Sequence[Entry], device: torch.device) -> None:
    """Serve the process that compares: say the names of all cases, then for each line of the input take a turn of the case it names."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever prints meanwhile
    known = {entry.name: entry for entry in entries}
    print(json.dumps(list(known)), file=answers, flush=True)
    for name, lines in groupby(sys.stdin, str.strip):
        entry, case, stamp = known.get(name), None, None
        for _ in lines:
            rows: list[Record] = []
            if entry is not None:
                try:
                    with in_mode(entry.mode) as dtype:
                        if case is None:
                            torch.manual_seed(0)
                            case = entry.case(device, dtype)
                        rows = turn(entry, case)
                except Exception as error:  # one case's failure is its row
                    rows = [_row(entry, own, f"failed: {first_line(error)}") for own in entry.own]
            stamp = stamp or take_stamp(device)
            texts = [{name: cell(value) for name, value in (row | stamp).items()} for row in rows]
            print(json.dumps(texts), file=answers, flush=True)
        del case
        if device.type == "cuda":
            gc.collect()  # optimized models refer to themselves
            torch.cuda.empty_cache()


HERE = Path(__file__).resolve().parents[1]
BEFORE, NOW = "before", "now"
TURNS = 3
COLUMNS = ("side", *ROW, *STAMP)


@contextmanager
def worker(checkout: Path, flags: Sequence[str]) -> Iterator[Callable[[str | None], list[Any]]]:
    """The process that measures one checkout, as a function: of None it gives the names of its cases, of a name the rows of one turn.

    There are no rows where the checkout has no such case.
    """
    script = checkout / "recipes" / "gate.py"
    if not script.is_file():
        raise OptionError(f"--base takes a checkout that has this recipe, and there is no {script}; name another folder")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (str(checkout), os.environ.get("PYTHONPATH"))))}
    command = [sys.executable, str(script), "--worker", *flags]
    process = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def answer(name: str | None) -> list[Any]:
        assert process.stdin is not None and process.stdout is not None
        if name is not None:
            print(name, file=process.stdin, flush=True)
        line = process.stdout.readline()
        if not line:
            raise FlysurgeryError(f"the process that measures {checkout} ended with {process.wait()}; see what it wrote above")
        return json.loads(line)

    try:
        yield answer
    finally:
        process.kill()
        process.communicate()


def settled(turns: Sequence[Record]) -> Record:
    """One row out of those of its turns: medians, the largest error, and as noise the spread of the times; or the turn that failed."""
    failed = [each for each in turns if each["status"] != "ok"]
    if failed:
        return failed[0]
    own, reference = ([float(each[name]) for each in turns] for name in ("ms", "reference_ms"))
    numbers = {"ms": median(own), "noise": max(own) / min(own) - 1, "reference_ms": median(reference)}
    numbers |= {"ratio": median(own) / median(reference), "error": max(float(each["error"]) for each in turns)}
    return turns[-1] | {name: cell(value) for name, value in numbers.items()}


def noise_of(before: Record, now: Record) -> float:
    """The larger of both sides' noise, or the difference between their times of the reference."""
    drift = abs(float(now["reference_ms"]) / float(before["reference_ms"]) - 1) if before["reference"] == now["reference"] else 0.0
    return max(drift, *(float(each["noise"]) for each in (before, now)))


def verdict(before: Record | None, now: Record | None) -> str:
    """Whether a row holds: "ok", "faster", "new", or what is wrong with it. ``now`` is None where the row is gone."""
    if now is None:
        return "gone"
    if now["status"] != "ok":
        return now["status"]
    if float(now["error"]) > float(now["most_error"]):
        return f"wrong: its error is {now['error']}, and may be {now['most_error']}"
    if before is None or before["status"] != "ok":
        return "new"
    tolerance, change, noise = float(now["tolerance"]), float(now["ms"]) / float(before["ms"]) - 1, noise_of(before, now)
    if change > tolerance + min(noise, tolerance):
        return f"slower by {change:.1%}, where {tolerance:.0%} and the noise are allowed"
    return "faster" if change < -tolerance - noise else "ok"


def compare(records: Sequence[Record]) -> bool:
    """Print the rows of both sides beside each other, and say whether all hold."""
    sides = {side: {(each["case"], each["candidate"]): each for each in records if each["side"] == side} for side in (BEFORE, NOW)}
    lines, failures = [], 0
    for key in dict.fromkeys((*sides[NOW], *sides[BEFORE])):
        before, now = sides[BEFORE].get(key), sides[NOW].get(key)
        said = verdict(before, now)
        failures += said not in ("ok", "faster", "new")
        shown: Record = dict.fromkeys(COLUMNS, "") | (now or {})
        old, new = (each["ms"] if each else "" for each in (before, now))
        ratio = f"{float(new) / float(old):.3f}" if old and new else ""
        noise = f"{noise_of(before, now):.1%}" if before and now and ratio else ""
        lines.append([*key, old, new, ratio, noise, shown["reference"], shown["ratio"], shown["error"], shown["launch"], said])
    titles = ("case", "candidate", "before ms", "now ms", "now/before", "noise", "reference", "to reference", "error", "launch", "verdict")
    print(text_table(titles, lines, right=titles[2:6]))
    print(f"{len(lines)} rows, {len(lines) - failures} hold" + (f", {failures} fail" if failures else ""))
    return not failures


def measured(checkouts: dict[str, Path], flags: Sequence[str], only: re.Pattern[str], save: Path | None) -> list[Record]:
    """The rows of each side, all sides taking turns with each case; written after each case."""
    records: list[Record] = []
    with ExitStack() as stack:
        sides = {side: stack.enter_context(worker(checkout, flags)) for side, checkout in checkouts.items()}
        known = list(dict.fromkeys(name for ask in sides.values() for name in ask(None)))
        names = [name for name in known if only.search(name)]
        if not names:
            raise OptionError(f"--only {only.pattern} matches none of the cases: {'; '.join(known)}")
        for name in names:
            turns = [(side, row) for _ in range(TURNS) for side, ask in sides.items() for row in ask(name)]
            for key in dict.fromkeys((side, row["candidate"]) for side, row in turns):
                row = settled([row for side, row in turns if (side, row["candidate"]) == key])
                records.append({column: row.get(column, "") for column in COLUMNS} | {"side": key[0]})
            if save is not None:
                replace_text(save, as_csv(records))
            print(f"measured {name}", file=sys.stderr, flush=True)
    return records


def main() -> None:
    parser = recipe.parser_of(__doc__)
    parser.add_argument("--base", type=Path, help="the checkout to compare with, measured in turns with this one")
    parser.add_argument("--save", type=Path, help="write the rows of all checkouts into this CSV file")
    parser.add_argument("--only", type=recipe.expression, default="", metavar="REGEX", help="the cases whose names it is found in")
    parser.add_argument("--cpu", action="store_true", help="the cases of the CPU, on two threads")
    parser.add_argument("--quick", action="store_true", help="tiny cases, to see that everything runs: a minute, on a CPU too")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    on_cuda = torch.cuda.is_available() and not options.cpu
    if not (on_cuda or options.cpu or options.quick):
        raise SystemExit("this needs a CUDA device; --cpu measures models on the CPU, and --quick tiny cases anywhere")
    if options.worker:
        if options.cpu:
            torch.set_num_threads(2)
        work(QUICK if options.quick else CPU if options.cpu else GPU, torch.device("cuda" if on_cuda else "cpu"))
        return
    if options.save is not None:
        check_file(options.save, "--save")
    checkouts = ({} if options.base is None else {BEFORE: options.base.expanduser().resolve()}) | {NOW: HERE}
    flags = [f"--{name}" for name in ("cpu", "quick") if getattr(options, name)]
    if not compare(measured(checkouts, flags, options.only, options.save)):
        raise SystemExit(1)


if __name__ == "__main__":
    recipe.main(main)
