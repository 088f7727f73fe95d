"""What the gate measures: a table of cases, how each is made ready, and one turn of it."""

from __future__ import annotations

import gc
import json
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from typing import Any

import torch
from recipe import VIT_S, Run
from torch import Tensor, nn

from flysurgery.bench import Protocol, in_mode, measure, take_stamp
from flysurgery.bench.measuring import NOISE, checked_rows, one_line
from flysurgery.bench.rows import records_of
from flysurgery.bench.units import Unit, units
from flysurgery.bench.variants import VARIANTS, by_definition, fused_modules
from flysurgery.factors import factors_to_dense, ks_einsum
from flysurgery.layers import ButterflyLinear
from flysurgery.patterns import Architecture, Pattern

STEP, FACTOR = "training step", "factor"
PROTOCOL = Protocol("graph", 15, 0.15)
"""One turn of one case: at most 15 samples of each candidate, in 0.15 s."""

DENSE_ENTRIES = 1 << 20
"""A factor of at most so many entries, zeros included, is timed as a dense matrix too."""


@dataclass(frozen=True)
class Case:
    """What is measured: ``part`` is a part of ``flysurgery.bench.units``, ``STEP`` or ``FACTOR``; each of ``own`` gets a row.

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


PATTERNS = ("1,64,64,8", "2,96,96,4", "4,128,128,4", "12,64,64,4")
GPU = (
    Case("model", "fp16", own=("optimized", "dense optimized")),
    *(Case("model", mode) for mode in ("bf16", "tf32", "fp32")),
    Case("model", "fp16", arch="monarch"),
    Case("model", "fp16", model="vit_base_patch16_224"),
    *(Case("model", "fp16", batch=images) for images in (1, 2, 8)),
    *(Case("FFN", "fp16", arch=arch) for arch in ("gonon", "monarch")),
    Case(STEP, "bf16", own=("converted",)),
    *(Case(FACTOR, mode, 128 * 196, pattern, own=("layer",)) for mode in ("fp32", "fp16") for pattern in PATTERNS),
)
CPU = tuple(Case("model", "fp32", 16, arch, own=("converted",)) for arch in ("gonon", "monarch"))
QUICK = (
    Case("model", "fp32", 2, "monarch", "test_vit", ("optimized", "converted", "dense optimized")),
    Case("FFN", "fp32", 2, "monarch", "test_vit"),
    Case(STEP, "bf16", 2, "monarch", "test_vit", ("converted",)),
    Case(FACTOR, "fp32", 40, "2,8,4,3", own=("layer",)),
)


@dataclass(frozen=True)
class Runs:
    """A case, ready to be measured: its own candidates and PyTorch's, their input, and what they must give in float64.

    ``rows`` are those of the results that the truths hold, and ``base`` what results are a change of, as in ``flysurgery.bench.measure``.
    """

    own: Mapping[str, Run]
    references: Mapping[str, Run]
    x: Tensor
    truths: Tensor | Mapping[str, Tensor]
    rows: Sequence[int] | None = None
    base: Tensor | None = None


@dataclass(frozen=True)
class Row:
    """One candidate of one case. ``ratio`` is its time over the reference's, ``most_error`` what its error may be.

    ``tolerance`` is the share by which the time may grow, ``noise`` that by which it differs between turns.
    """

    case: str
    candidate: str
    status: str
    launch: str | None = None
    ms: float | None = None
    noise: float | None = None
    reference: str | None = None
    reference_ms: float | None = None
    ratio: float | None = None
    error: float | None = None
    most_error: float | None = None
    tolerance: float | None = None


@cache
def parts(model: str, arch: str) -> Mapping[str, Unit]:
    """The parts of a converted model by name; the model is built once."""
    return {unit.name: unit for unit in units("today", model, {}, arch, seed=0)}


def module_runs(case: Case, device: torch.device, dtype: torch.dtype) -> Runs:
    """A model, or a feed-forward block with norm and residual, for inference."""
    unit = parts(case.model, case.arch)[case.part]
    module = unit.make().to(device, dtype)
    dense = VARIANTS["dense"](module)
    x = torch.randn(case.batch, *unit.shape).to(device, dtype)
    rows = checked_rows(case.batch, 4)
    with torch.no_grad():
        truth = by_definition(module).double()(x[rows].double())
    ways: dict[str, Callable[[], nn.Module]] = {
        "converted": lambda: module,
        "optimized": lambda: fused_modules(module, x),
        "dense optimized": lambda: fused_modules(dense, x),
    }
    return Runs({name: ways[name]() for name in case.own}, {"dense": dense}, x, truth, rows, x[rows] if case.part == "FFN" else None)


def step_runs(case: Case, device: torch.device, dtype: torch.dtype) -> Runs:
    """A training step under autocast: forward, cross entropy, backward, AdamW. It gives a gradient of the first feed-forward layer.

    The learning rate is zero, so that every step gives the same gradient; it takes as long as any other.
    """
    unit = parts(case.model, case.arch)["model"]
    module: Any = unit.make().to(device)
    x = torch.randn(case.batch, *unit.shape).to(device)
    labels = torch.randint(0, module.num_classes, (case.batch,)).to(device)

    def backward(model: nn.Module, x: Tensor, labels: Tensor) -> None:
        (nn.functional.cross_entropy(model(x), labels, reduction="sum") / case.batch).backward()

    def gradient(model: Any) -> Tensor:
        found = max(model.blocks[0].mlp.fc1.parameters(), key=Tensor.numel).grad
        assert found is not None
        return found

    def exact(model: nn.Module) -> Tensor:
        double = by_definition(model).double().requires_grad_(True).train()
        for few, their in zip(x.double().split(8), labels.split(8), strict=True):  # all at once would need much memory
            backward(double, few, their)
        return gradient(double)

    def step(model: nn.Module) -> Run:
        model.requires_grad_(True).train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, fused=True, capturable=device.type == "cuda")

        def run(x: Tensor) -> Tensor:
            optimizer.zero_grad(set_to_none=True)
            capturing = x.is_cuda and torch.cuda.is_current_stream_capturing()
            with torch.autocast(device.type, dtype, cache_enabled=not capturing):
                backward(model, x, labels)
            optimizer.step()
            return gradient(model)

        return run

    own, dense = case.own[0], VARIANTS["dense"](module)
    truths = {own: exact(module), "dense": exact(dense)}
    return Runs({own: step(module)}, {"dense": step(dense)}, x, truths)


def factor_runs(case: Case, device: torch.device, dtype: torch.dtype) -> Runs:
    """A layer of one factor."""
    pattern = Pattern(*map(int, case.arch.split(",")))
    layer = ButterflyLinear(Architecture((pattern,)), bias=False).to(device, dtype).requires_grad_(False)
    factor = layer.factors[0]
    x = torch.randn(case.batch, pattern.in_features).to(device, dtype)
    rows = checked_rows(case.batch, 128)
    references: dict[str, Run] = {"einsum": lambda x: ks_einsum(x, factor)}
    if pattern.in_features * pattern.out_features <= DENSE_ENTRIES:
        weight = factors_to_dense([factor.double()]).to(dtype)
        references["dense"] = lambda x: nn.functional.linear(x, weight)
    return Runs({case.own[0]: layer}, references, x, ks_einsum(x[rows].double(), factor.double()), rows)


def made(case: Case, device: torch.device, dtype: torch.dtype) -> Runs:
    """The case, ready to be measured."""
    return {STEP: step_runs, FACTOR: factor_runs}.get(case.part, module_runs)(case, device, dtype)


def turn(case: Case, runs: Runs) -> list[Row]:
    """Check and time the candidates once. No baseline is named, so that none is timed twice: noise is seen between turns."""
    given = {"baseline": "", "worst": math.inf, "rows": runs.rows, "base": runs.base, "protocol": PROTOCOL}
    with torch.set_grad_enabled(case.part == STEP):
        found = measure({**runs.own, **runs.references}, runs.x, runs.truths, **given)
    timed = {name: ms for name in runs.references if (ms := found[name].median_ms) is not None}
    if not timed:
        statuses = ", ".join(found[name].status for name in runs.references)
        return [Row(case.name, name, f"not compared with PyTorch: {statuses}") for name in runs.own]
    reference, reference_ms = min(timed.items(), key=lambda item: item[1])
    most_error = case.worst * max(found[name].error or 0.0 for name in timed)
    rows = []
    for name in runs.own:
        own = found[name]
        ratio = None if own.median_ms is None else own.median_ms / reference_ms
        times = own.launch, own.median_ms, None, reference, reference_ms, ratio
        rows.append(Row(case.name, name, own.status, *times, own.error, most_error, NOISE[runs.x.device.type]))
    return rows


def work(cases: Sequence[Case], device: torch.device) -> None:
    """Serve the process that compares: say the names of all cases, then for each line of the input take a turn of the case it names."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever prints meanwhile
    known = {case.name: case for case in cases}
    print(json.dumps(list(known)), file=answers, flush=True)
    for name, lines in groupby(sys.stdin, str.strip):
        case, runs, stamp = known.get(name), None, None
        for _ in lines:
            rows: list[Row] = []
            if case is not None:
                try:
                    with in_mode(case.mode) as dtype:
                        if runs is None:
                            torch.manual_seed(0)
                            runs = made(case, device, dtype)
                        rows = turn(case, runs)
                except Exception as error:  # one case's failure is its row
                    rows = [Row(case.name, own, f"failed: {one_line(error)}") for own in case.own]
            stamp = stamp or take_stamp(device)
            print(json.dumps(records_of(rows, stamp)), file=answers, flush=True)
        del runs
        if device.type == "cuda":
            gc.collect()  # optimized models refer to themselves
            torch.cuda.empty_cache()
