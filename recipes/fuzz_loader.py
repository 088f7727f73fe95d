"""Load damaged and forged folders by the thousand, and count what comes of it.

    python recipes/fuzz_loader.py --cases 1000000 --out faults    # --quick: 500 cases; --seed; --minutes

Each case changes one to three things in a small valid folder: arguments, plan, configuration, header, tensors, bytes; hashes mostly
match. Every eighth is opened by timm. What is loaded must be what the files say, or the folder is refused in one sentence, within a
second, and the process grows by at most 200 MB. Anything else is a fault: its files are kept under ``--out``, and the exit status is 1.

Needs a CPU, hours for a million cases.
"""

from __future__ import annotations

import argparse
import random
import resource
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import torch
from loader_cases import Case, Outcome, damaged, outcome_of, valid_folders
from recipe import count, duration

QUICK_CASES = 500
TIMM_EVERY = 8
MAX_BYTES = 200 << 20
FINE = ("equal", "refused")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=count, default=10_000, help="how many folders (10,000)")
    parser.add_argument("--minutes", type=duration, help="stop after so many")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("faults"), help="where the files of faults are kept (faults)")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_CASES} cases")
    options = parser.parse_args()
    torch.set_num_threads(1)
    counts, slowest, grown = run(QUICK_CASES if options.quick else options.cases, options.minutes, options.seed, options.out)
    print(", ".join(f"{number:,} {kind}" for kind, number in sorted(counts.items())), end="; ")
    print(f"slowest {slowest:.2f} s, memory grew by {grown / 1e6:.0f} MB")
    if set(counts) - set(FINE) or grown > MAX_BYTES:
        sys.exit(1)


def run(cases: int, minutes: float | None, seed: int, out: Path) -> tuple[Counter[str], float, int]:
    """The number of cases of each outcome, the slowest's seconds, and by how many bytes the process's peak grew."""
    counts: Counter[str] = Counter()
    slowest, start = 0.0, time.perf_counter()
    with tempfile.TemporaryDirectory() as home:
        valid = valid_folders(Path(home))
        folder = Path(home) / "case"
        folder.mkdir()
        for each in valid:  # so that what is loaded once, modules above all, counts for nobody
            for by_timm in (False, True):
                outcome_of(folder, Case(each.files), by_timm=by_timm)
        before = _peak()
        for number in range(cases):
            if minutes is not None and time.perf_counter() - start > 60 * minutes:
                break
            draw = random.Random(f"{seed} {number}")
            case = damaged(draw.choice(valid), draw)
            outcome = outcome_of(folder, case, by_timm=number % TIMM_EVERY == 0)
            counts[outcome.kind] += 1
            slowest = max(slowest, outcome.seconds)
            if outcome.kind not in FINE:
                _keep(folder, case, outcome, out / f"{seed}-{number}")
        return counts, slowest, _peak() - before


def _keep(folder: Path, case: Case, outcome: Outcome, kept: Path) -> None:
    shutil.copytree(folder, kept, dirs_exist_ok=True)
    changes = "\n".join(case.changes)
    (kept / "fault.txt").write_text(f"{outcome.kind}, {outcome.seconds:.2f} s\n{changes}\n\n{outcome.text}\n", encoding="utf-8")
    print(f"{kept}: {outcome.kind}; {'; '.join(case.changes)}", flush=True)


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    main()
