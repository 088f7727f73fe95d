"""Measure one factor by every implementation, in time and in energy, and a layer of two factors beside its rivals.

    python recipes/factors.py patterns --minutes 9 --out build/patterns.csv
    python recipes/factors.py large --cases 0::2 --minutes 9 --out build/large_0.csv
    python recipes/factors.py energy --window 0.3 --cases 40:80 --minutes 9 --out build/energy_40.csv

The tables:

    patterns  Tables 2, 4 and 7 and Figures 5, 6 and 9 to 17 of Gonon et al. 2024: one factor by every implementation, on their 627
              patterns, in both memory layouts for the implementations that have them. The claims and the figures' quartiles are printed
    large     dense and CSR where the table before leaves them out, as a call takes seconds: two calls, or one of more than a second, after
              one on few rows. Dense is measured once for each size. ``publish.py --fill`` puts the rows in their places
    energy    their Figure 7: joules of a call, read from NVML's counter of the whole device, in windows of at least a second of
              replayed graphs. bmm is measured twice. ``vits.py optimized --joules`` has whole models
    rivals    the linears of a ViT-S/16 beside low rank, magnitude pruning, 2:4 sparsity, int8, fp8 and lazylinop, each held against
              float64 with its own weights: what pruning and rounding do to a model's accuracy is no part of this table. Low rank has
              as many weights as the butterfly. Pruned weights have its density and others, and once rows of uneven lengths. They are
              multiplied by PyTorch's CSR (cuSPARSE) and by a Triton kernel of this project, in both layouts. torchao and lazylinop
              are optional; ``--candidates dense,pruning`` takes one kind alone

25088 rows. Patterns come in one shuffled order, so that a run that ends after ``--minutes`` has measured a random subset, and the next run
with the same ``--out`` goes on. Pieces by ``--cases`` need not share a machine or a file; a pattern is two cases in each mode, one for each
layout. What cannot be captured in a graph (bsr) is launched from Python, and its row says so. ``bound_ms`` is what
a large copy and a large matrix product, measured in the same run, allow. On a CPU energy has times without joules.

Needs ``pip install 'flysurgery[bench]'``, any device, and for energy an NVIDIA GPU.
Rows: recipes/results/patterns_h200.csv, recipes/results/energy_h200.csv, recipes/results/rivals_h200.csv
"""

from __future__ import annotations

from paper_patterns import (
    CANDIDATES,
    FIRST,
    LAST,
    ROWS,
    energy_patterns,
    factor_case,
    large_cases,
    large_rows,
    print_claims,
    print_energy,
    time_patterns,
)
from recipe import Table, run
from rivals import KINDS, rivals_case

TABLES = {
    "patterns": Table(
        {"rows": (ROWS,), "mode": ("fp32", "fp16"), "layout": (FIRST, LAST)},
        factor_case,
        cases=time_patterns,
        quick={"rows": (24,)},
        few=2,
        candidates=CANDIDATES,
        seconds=0.05,
        summary=print_claims,
    ),
    "large": Table(
        {"rows": (ROWS,)},
        rows=large_rows,
        cases=large_cases,
        quick={"rows": (24,)},
        few=2,
        columns=("mode", "layout", "launch", "status", "error", "noise", "median_ms"),
    ),
    "energy": Table(
        {"rows": (ROWS,), "mode": ("fp32",), "layout": (FIRST, LAST)},
        factor_case,
        cases=energy_patterns,
        quick={"rows": (24,)},
        few=2,
        candidates=("bmm", "cuda", "einsum", "bsr"),
        needs_cuda=True,
        joules=True,
        seconds=0.05,
        summary=print_energy,
    ),
    "rivals": Table(
        {"mode": ("all",), "layer": ("square", "up", "down"), "arch": ("gonon",), "width": (384,), "rows": (ROWS,)},
        rivals_case,
        quick={"rows": (196,)},
        columns=("density", "note"),
        candidates=KINDS,
        free=("arch",),
        rounds=30,
    ),
}

if __name__ == "__main__":
    run(__doc__, TABLES)
