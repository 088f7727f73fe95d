"""Load damaged folders by the million, in several processes, and print what came of them.

    python -m tests.checkpoint.fuzz --processes 12 --cases 1000000

Each process prints its faults as they come, with the seed that makes the case again. Ends with the counts of all, and with exit code 1
if there was a fault.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
import warnings
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from tests.checkpoint import damage


def run_cases(seed: int, cases: int, seconds: float) -> dict[str, Any]:
    """Load ``cases`` damaged folders, or fewer where the seconds end before; case ``n`` is that of ``random.Random(f"{seed} {n}")``."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    counts, longest, growth, end = Counter[str](), 0.0, 0, time.monotonic() + seconds
    with tempfile.TemporaryDirectory() as home:
        folders = damage.valid_folders(Path(home))
        for number in range(cases):
            if time.monotonic() > end:
                break
            draw = random.Random(f"{seed} {number}")
            case, by_timm = damage.damaged(draw.choice(folders), draw), draw.random() < 0.25
            found = damage.outcome_of(Path(home), case, by_timm=by_timm)
            counts[found.kind] += 1
            longest, growth = max(longest, found.seconds), max(growth, found.growth)
            if found.kind not in damage.OUTCOMES:
                print(json.dumps([seed, number, case.changes, found.kind, found.text]), flush=True)
    return {"counts": counts, "longest": longest, "growth": growth}


def main() -> int:
    """Run the command line; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=1_000_000, help="folders in all (%(default)s)")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0, help="the first process's seed; the others take those after it")
    parser.add_argument("--minutes", type=float, default=600.0, help="stop after so many, with fewer folders (%(default)s)")
    options = parser.parse_args()
    share = -(-options.cases // options.processes)
    with ProcessPoolExecutor(options.processes, mp_context=get_context("spawn")) as pool:
        seeds = range(options.seed, options.seed + options.processes)
        parts = list(pool.map(run_cases, seeds, [share] * len(seeds), [60 * options.minutes] * len(seeds)))
    counts = sum((part["counts"] for part in parts), Counter[str]())
    longest, growth = max(part["longest"] for part in parts), max(part["growth"] for part in parts)
    print(f"{counts.total():,} folders: {json.dumps(dict(counts))}; at most {longest:.2f} s and {growth / (1 << 20):.0f} MiB more")
    return 0 if set(counts) <= set(damage.OUTCOMES) else 1


if __name__ == "__main__":
    raise SystemExit(main())
