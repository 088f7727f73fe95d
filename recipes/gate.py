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

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median

import recipe
import torch
from gate_cases import CPU, GPU, QUICK, ROW, work

from flysurgery.bench import Record
from flysurgery.bench.rows import STAMP, cell, check_file, write_records
from flysurgery.cli.tables import print_table
from flysurgery.errors import FlysurgeryError, OptionError

HERE = Path(__file__).resolve().parents[1]
BEFORE, NOW = "before", "now"
TURNS = 3
COLUMNS = ("side", *ROW, *STAMP)


class Worker:
    """The process that measures one checkout. ``names`` are its cases."""

    def __init__(self, checkout: Path, flags: Sequence[str]) -> None:
        script = checkout / "recipes" / "gate.py"
        if not script.is_file():
            raise OptionError(f"--base takes a checkout that has this recipe, and there is no {script}; name another folder")
        path = os.pathsep.join(filter(None, (str(checkout), os.environ.get("PYTHONPATH"))))
        self._checkout = checkout
        self._process = subprocess.Popen(
            [sys.executable, str(script), "--worker", *flags],
            env={**os.environ, "PYTHONPATH": path},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.names: list[str] = self._answer()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def turn(self, name: str) -> list[Record]:
        """The rows of one turn of a case; none if the checkout has no such case."""
        assert self._process.stdin is not None
        print(name, file=self._process.stdin, flush=True)
        return self._answer()

    def _answer(self) -> list:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise FlysurgeryError(f"the process that measures {self._checkout} ended with {self._process.wait()}; see what it wrote above")
        return json.loads(line)


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
    print_table(titles, lines, right=titles[2:6])
    print(f"{len(lines)} rows, {len(lines) - failures} hold" + (f", {failures} fail" if failures else ""))
    return not failures


def measured(checkouts: dict[str, Path], flags: Sequence[str], only: re.Pattern[str], save: Path | None) -> list[Record]:
    """The rows of each side, all sides taking turns with each case; written after each case."""
    records: list[Record] = []
    with ExitStack() as stack:
        workers = {side: stack.enter_context(Worker(checkout, flags)) for side, checkout in checkouts.items()}
        known = list(dict.fromkeys(name for worker in workers.values() for name in worker.names))
        names = [name for name in known if only.search(name)]
        if not names:
            raise OptionError(f"--only {only.pattern} matches none of the cases: {'; '.join(known)}")
        for name in names:
            turns = [(side, row) for _ in range(TURNS) for side, worker in workers.items() for row in worker.turn(name)]
            for key in dict.fromkeys((side, row["candidate"]) for side, row in turns):
                row = settled([row for side, row in turns if (side, row["candidate"]) == key])
                records.append({column: row.get(column, "") for column in COLUMNS} | {"side": key[0]})
            if save is not None:
                write_records(save, records)
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
