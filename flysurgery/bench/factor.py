"""Times of one factor by every implementation and in both memory layouts: Tables 2, 4 and 7 of Gonon et al. 2024."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from flysurgery.bench.ceilings import Ceilings, Work
from flysurgery.bench.layouts import (
    FIRST,
    LAST,
    PRODUCT_ONLY,
    blocks_of,
    factor_runs,
    problem_of_factor,
    product_only,
    rows_first,
    rows_of_blocks,
)
from flysurgery.bench.measuring import AGAIN, MOST_ERROR, Measured, Protocol, checked_rows, judged, measure, relative_error
from flysurgery.bench.modes import in_mode
from flysurgery.bench.timing import time_interleaved
from flysurgery.bench.work import work_of_factor
from flysurgery.factors import ks_einsum
from flysurgery.patterns import Pattern

CHECKED_ROWS = 128
ORDER = ("dense", "dense" + AGAIN, "bmm", "bmm" + AGAIN, "cuda", "einsum", "bsr", "sparse", PRODUCT_ONLY)


@dataclass(frozen=True)
class FactorRow:
    """One implementation of one factor. ``rewriting`` is (b+c)/(bc). Where dense is left out there is no ratio, and bmm is timed twice."""

    a: int
    b: int
    c: int
    d: int
    rewriting: float
    size: int
    rows: int
    mode: str
    device_type: str
    layout: str
    candidate: str
    measured: Measured


def factor_head(pattern: Pattern, rows: int, mode: str, device: torch.device) -> dict[str, object]:
    """What identifies the rows of one pattern."""
    a, b, c, d = pattern.factor_shape
    return {"a": a, "b": b, "c": c, "d": d, "rows": rows, "mode": mode, "device_type": device.type}


def bench_factor(pattern: Pattern, rows: int, mode: str, device: torch.device, ceilings: Ceilings, protocol: Protocol) -> list[FactorRow]:
    """Measure one factor, weights uniform with variance 1/(3c) and Gaussian x, first in one layout, then in the other."""
    found: list[FactorRow] = []
    with in_mode(mode) as dtype, torch.no_grad():
        generator = torch.Generator(device=device).manual_seed(protocol.seed)
        x = torch.randn(rows, pattern.in_features, generator=generator, device=device, dtype=dtype)
        factor = torch.empty(pattern.factor_shape, device=device).uniform_(-(pattern.c**-0.5), pattern.c**-0.5, generator=generator)
        factor = factor.to(dtype)
        checked = checked_rows(rows, CHECKED_ROWS)
        truth = ks_einsum(x[checked].double(), factor.double())
        size = pattern.in_features * pattern.out_features
        work = work_of_factor(pattern, rows, x.element_size())
        for layout in (FIRST, LAST):
            arranged = x if layout == FIRST else x.T.contiguous()
            measured = _one_layout(arranged, factor, pattern, layout, checked, truth, mode, ceilings, work, protocol)
            head = (*pattern.factor_shape, (pattern.b + pattern.c) / (pattern.b * pattern.c), size, rows, mode, device.type, layout)
            found += [FactorRow(*head, name, measured[name]) for name in ORDER if name in measured]
            if device.type == "cuda":
                torch.cuda.empty_cache()
    return found


def _one_layout(
    x: Tensor,
    factor: Tensor,
    pattern: Pattern,
    layout: str,
    checked: list[int],
    truth: Tensor,
    mode: str,
    ceilings: Ceilings,
    work: Work,
    protocol: Protocol,
) -> dict[str, Measured]:
    rows = x.shape[0 if layout == FIRST else 1]
    runs, refused = factor_runs(factor, layout, problem_of_factor(pattern, rows, x, allow_tf32=mode == "tf32"))
    measured = measure(
        {name: run if layout == FIRST else rows_first(run) for name, run in runs.items()},
        x,
        truth,
        baseline="dense" if "dense" in runs else "bmm",
        rows=checked,
        refused=refused,
        works=work,
        ceilings=ceilings,
        protocol=protocol,
    )
    if "dense" not in runs:
        measured = {name: replace(each, ratio_to_dense=None) for name, each in measured.items()}
    blocks = blocks_of(x, pattern, layout).contiguous()
    run = product_only(factor, layout)
    error = relative_error(rows_of_blocks(run(blocks), checked, pattern, layout), truth)
    right = {PRODUCT_ONLY: run} if error <= MOST_ERROR else {}
    timings = time_interleaved(right, blocks, rounds=protocol.rounds, seconds=protocol.seconds, launch=protocol.launch)
    status = "ok" if right else f"wrong: relative error {error:.2g}"
    measured[PRODUCT_ONLY] = judged(status, error, timings.get(PRODUCT_ONLY), None, None, work, ceilings, protocol)
    return measured
