"""What the gate measures: a table of cases, how each is made ready, and one turn of it."""

from __future__ import annotations

import gc
import json
import math
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from typing import Any

import torch
from recipe import VIT_S, Place, Run
from torch import nn
from vit_parts import VARIANTS, training_case
from vit_units import parts

from flysurgery.bench import Case, Protocol, Record, in_mode, measure, take_stamp
from flysurgery.bench.measuring import NOISE, checked_rows
from flysurgery.bench.rows import cell
from flysurgery.bench.variants import by_definition, dense_copy
from flysurgery.errors import first_line
from flysurgery.factors import factors_to_dense, ks_einsum
from flysurgery.layers import ButterflyLinear
from flysurgery.patterns import Architecture, Pattern

STEP, FACTOR = "training step", "factor"
PROTOCOL = Protocol("graph", 15, 0.15)
"""One turn of one case: at most 15 samples of each candidate, in 0.15 s."""

DENSE_ENTRIES = 1 << 20
"""A factor of at most so many entries, zeros included, is timed as a dense matrix too."""

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
    def name(self) -> str:
        """By which rows of two checkouts are matched."""
        of = "" if self.part == FACTOR else f"{self.model} "
        return f"{of}{self.part} {self.arch}, {self.mode}, {self.batch}"

    @property
    def worst(self) -> float:
        """How many times the reference's error its own may be."""
        return 1.06 if self.mode in ("fp16", "bf16") and self.part != STEP else 2.0

    def case(self, device: torch.device, dtype: torch.dtype) -> Case:
        """Its own candidates and PyTorch's, ready to be measured.

        No baseline is named, so that none is timed twice: noise is seen between turns.
        """
        if self.part == STEP:
            case = training_case(Place(device), model=self.model, arch=self.arch, batch=self.batch, mode=self.mode)
        else:
            case = (factor_case if self.part == FACTOR else module_case)(self, device, dtype)
        return replace(case, baseline="", worst=math.inf)


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


def module_case(entry: Entry, device: torch.device, dtype: torch.dtype) -> Case:
    """A model, or a feed-forward block with norm and residual, for inference."""
    unit = parts("today", entry.model, entry.arch)[entry.part]
    module = unit.make().to(device, dtype)
    dense = dense_copy(module)
    x = torch.randn(entry.batch, *unit.shape).to(device, dtype)
    rows = checked_rows(entry.batch, 4)
    with torch.no_grad():
        truth = by_definition(module).double()(x[rows].double())
    runs = {**{name: VARIANTS[name](module, x) for name in entry.own}, "dense": dense}
    return Case(runs, x, truth, rows, base=x[rows] if entry.part == "FFN" else None)


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
    """Check and time the candidates once."""
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
            stamp = stamp or asdict(take_stamp(device))
            texts = [{name: cell(value) for name, value in (row | stamp).items()} for row in rows]
            print(json.dumps(texts), file=answers, flush=True)
        del case
        if device.type == "cuda":
            gc.collect()  # optimized models refer to themselves
            torch.cuda.empty_cache()
