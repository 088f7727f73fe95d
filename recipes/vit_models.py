"""The tables of whole models: as ``flysurgery.optimize`` makes them, and in training."""

from __future__ import annotations

import argparse
import copy
import random
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import recipe
import tables
import timm
import torch
from torch import Tensor, nn

import flysurgery
from flysurgery.bench import EnergyMeter, Measured, Timing, in_mode, noise_of, status_of
from flysurgery.bench.ceilings import work_of, work_of_step
from flysurgery.bench.units import converted_timm
from flysurgery.bench.variants import VARIANTS, by_definition, chosen_backends
from flysurgery.cli.options import names
from flysurgery.errors import OptionError
from flysurgery.walker import example_input

CHECKED = 8
"""Images whose outputs are held against float64."""

DENSE = "dense"
TWINS = {DENSE: DENSE, "dense optimized": DENSE, "converted": "converted", "optimized": "converted"}
"""Each candidate that nothing compiles, and the model without fusion that it computes."""

COMPILED = {"dense compiled": DENSE, "optimized compiled": "optimized"}
"""What goes through ``torch.compile``, and the candidate that it is made of. Of an optimized model it fuses what is between groups."""

METERED = (DENSE, "dense optimized", "optimized")
"""The candidates whose joules are measured."""


@dataclass(frozen=True)
class Case:
    """What is compared: ``compiled`` adds those through ``torch.compile``, ``max_autotune`` its longest search, ``energy`` joules."""

    model: str
    arch: str
    mode: str
    batch: int
    compiled: bool = True
    max_autotune: bool = False
    energy: bool = False


HEADLINE = (
    Case("vit_small_patch16_224", "gonon", "fp16", 128, energy=True),
    Case("vit_small_patch16_224", "gonon", "fp16", 1, compiled=False),
    Case("vit_base_patch16_224", "gonon", "fp16", 128),
)


@dataclass(frozen=True)
class OptimizedRow:
    """One candidate; ``fused`` counts the groups of layers that became fused modules. Joules are those of the whole batch."""

    model: str
    arch: str
    mode: str
    batch: int
    candidate: str
    fused: int
    joules: float | None
    joules_to_dense: float | None
    measured: Measured


def measure_optimized(options: argparse.Namespace) -> None:
    """The table of optimized models."""
    table = tables.table_of(options)
    own = {"compiled": not options.quick, "max_autotune": options.max_autotune, "energy": options.energy}
    cases = [
        Case(options.model, arch, mode, batch, **own)
        for batch in table.few(options.batches or (recipe.images(options, table.device), 1))
        for mode in table.modes
        for arch in table.few(names(options.archs, "--archs"))
    ]
    by_columns = {(case.model, case.arch, case.mode, case.batch): case for case in (HEADLINE if options.headline else cases)}
    meter = _meter(table.device) if any(case.energy for case in by_columns.values()) else None

    def rows_of(**columns: Any) -> list[OptimizedRow]:
        return _optimized(table, by_columns[tuple(columns.values())], meter)

    records = table.make(OptimizedRow, [dict(zip(("model", "arch", "mode", "batch"), each, strict=True)) for each in by_columns], rows_of)
    tables.draw(options.plot, records, group=("model", "arch", "batch"))


def _optimized(table: tables.Table, case: Case, meter: EnergyMeter | None) -> list[OptimizedRow]:
    """Check, time and meter all candidates of one case."""
    device = table.device
    with in_mode(case.mode) as dtype:
        dense = timm.create_model(case.model, pretrained=False)
        plain = {DENSE: dense, "converted": converted_timm(case.model, {}, case.arch)}
        plain = {name: model.to(device, dtype).eval().requires_grad_(False) for name, model in plain.items()}
        # Drawn on the CPU: a graph that could not be captured leaves CUDA's generator unusable.
        x = torch.randn(case.batch, *cast(Tensor, example_input(dense)).shape[1:]).to(device, dtype)
        models = {name: copy.deepcopy(plain[twin]) for name, twin in TWINS.items()}
        fused = dict.fromkeys(models, 0)
        for name in ("dense optimized", "optimized"):
            report = flysurgery.optimize(models[name], x)
            fused[name] = len(report.fused)
            print(f"{name}: {report}", flush=True)
        runs: dict[str, recipe.Run | str] = dict(models)
        if case.max_autotune:
            runs["dense max-autotune"] = table.compiled(models[DENSE], "max-autotune-no-cudagraphs")
        if case.compiled:
            runs |= {name: table.compiled(models[plain_one]) for name, plain_one in COMPILED.items()}
        twins = {name: TWINS.get(COMPILED.get(name, name), DENSE) for name in runs}
        with torch.inference_mode():
            rows = range(min(CHECKED, case.batch))
            works = {name: work_of(by_definition(model), x) for name, model in plain.items()}
            truths = {name: by_definition(model).double()(x[list(rows)].double()) for name, model in plain.items()}
            checks = {name: truths[twin] for name, twin in twins.items()}, {name: works[twin] for name, twin in twins.items()}
            found = table.measure(case.mode, runs, x, *checks, worst=16, rows=rows)
            joules = _joules(meter, {name: models[name] for name in METERED if found[name].median_ms}, x) if case.energy and meter else {}
    dense_joules = joules.get(DENSE)
    ratios = {name: own / dense_joules for name, own in joules.items() if own and dense_joules}
    head = (case.model, case.arch, case.mode, case.batch)
    return [OptimizedRow(*head, name, fused.get(name, 0), joules.get(name), ratios.get(name), each) for name, each in found.items()]


def _joules(meter: EnergyMeter, models: Mapping[str, nn.Module], x: Tensor) -> dict[str, float | None]:
    idle = meter.idle_watts()
    return {name: meter.measure(model, x, windows=2, idle_watts=idle).joules for name, model in models.items()}


def _meter(device: torch.device) -> EnergyMeter | None:
    try:
        return EnergyMeter(device)
    except OptionError as error:
        print(f"no joules: {error}")
        return None


DEPTH = 12
TOGETHER = 10
"""Training steps that are timed on end."""


@dataclass(frozen=True)
class TrainingRow:
    """A forward pass or a training step of the whole model, milliseconds; ``error`` is relative, in the Frobenius norm."""

    arch: str
    mode: str
    batch: int
    what: str
    dense_ms: float | None
    converted_ms: float | None
    ratio_to_dense: float | None
    error: float | None
    dense_error: float | None
    backends: str
    judged: tables.Judged


def measure_training(options: argparse.Namespace) -> None:
    """The table of a forward pass and of a training step; with --quick on a CPU the model has one block."""
    table = tables.table_of(options)
    depth = 1 if options.quick and not table.on_cuda else DEPTH
    torch.manual_seed(options.seed)
    converted = converted_timm(recipe.VIT_S, {"depth": depth}, options.arch).to(table.device)
    whats = [each if depth == DEPTH else f"{each}, {depth} block" for each in ("inference", "training step")]
    head = {"arch": options.arch, "batch": options.batch or recipe.images(options, table.device)}
    cases = [head | {"mode": mode, "what": whats[0]} for mode in table.modes] + [head | {"mode": "bf16", "what": whats[1]}]

    def rows_of(**case: Any) -> list[TrainingRow]:
        return (_inference if case["what"] == whats[0] else _training)(table, converted, **case)

    records = table.make(TrainingRow, cases, rows_of)
    tables.draw(options.plot, records, group=("what",), series="mode", by="arch")


def _inference(table: tables.Table, model: nn.Module, arch: str, mode: str, batch: int, what: str) -> list[TrainingRow]:
    """Time one forward pass of each model in a CUDA graph, and hold both against float64."""
    with in_mode(mode) as dtype:
        own = copy.deepcopy(model).eval().requires_grad_(False).to(dtype)
        runs = {DENSE: VARIANTS["dense"](own), "converted": own}
        x = torch.randn(batch, 3, 224, 224).to(table.device, dtype)
        rows = range(min(CHECKED, batch))
        with torch.inference_mode():
            truths = {name: by_definition(run).double()(x[list(rows)].double()) for name, run in runs.items()}
        works = {name: work_of(by_definition(run), x) for name, run in runs.items()}
        found = table.measure(mode, runs, x, truths, works, worst=16, rows=rows)
        backends = chosen_backends(own, x, allow_tf32=mode == "tf32", rows=batch * 197) or ""
    dense, converted = found[DENSE], found["converted"]
    _, ratio, judged = tables.cells(converted, dense)
    times = dense.median_ms, converted.median_ms, ratio, converted.error, dense.error
    return [TrainingRow(arch, mode, batch, what, *times, backends, judged)]


def _training(table: tables.Table, model: nn.Module, arch: str, mode: str, batch: int, what: str) -> list[TrainingRow]:
    """Time a training step of each model in three ways, the models by turns in shuffled order: a host's pace changes."""
    trained = {name: _Training(each, batch, table.device) for name, each in ((DENSE, VARIANTS["dense"](model)), ("converted", model))}
    work = trained["converted"].work
    trained["dense again"] = trained[DENSE]
    ways: list[tuple[str, Callable[[_Training], object] | str, int, int]] = [
        (what, lambda each: float(each.step()), 1, 20),
        (f"{what}, {TOGETHER} on end", lambda each: [each.step() for _ in range(TOGETHER)], TOGETHER, 7),
        (f"{what}, CUDA graph", (lambda each: each.replay()) if table.on_cuda else tables.NEEDS_CUDA, 1, 10),
    ]
    rows, shuffled = [], random.Random(table.options.seed).sample
    for label, run, steps, rounds in ways:
        head = arch, mode, batch, label
        if isinstance(run, str):
            rows.append(TrainingRow(*head, None, None, None, None, None, "", tables.cells(Measured("graph", run))[-1]))
            continue
        times: dict[str, list[float]] = {name: [] for name in trained}
        for _ in range(max(1, rounds // 10) if table.options.quick else rounds):
            for name in shuffled(list(trained), len(trained)):
                times[name].append(_milliseconds(partial(run, trained[name]), table.device) / steps)
        medians = {name: statistics.median(own) for name, own in times.items()}
        noise = noise_of({name: Timing(ms, ms, ms) for name, ms in medians.items()})
        before, after = medians[DENSE], medians["converted"]
        bound = table.ceilings(mode).bound_ms(work)
        judged = tables.Judged(work.bytes_moved, work.flops, 1e3 * bound, bound / after, noise, status_of(noise, table.device.type))
        rows.append(TrainingRow(*head, before, after, after / before, None, None, "", judged))
    for each in trained.values():
        each.check()
    return rows


class _Training:
    """A model trained on one batch, whose loss must fall, and on CUDA one step of it as a graph."""

    def __init__(self, model: nn.Module, batch: int, device: torch.device) -> None:
        self._model = copy.deepcopy(model).train().requires_grad_(True)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-3, fused=True, capturable=device.type == "cuda")
        self._x, self._target = torch.randn(batch, 3, 224, 224).to(device), torch.randint(0, 1000, (batch,)).to(device)
        self.work = work_of_step(by_definition(self._model), self._x, self._target)
        losses = [float(self.step()) for _ in range(8)]
        self._first = losses[0]
        self._graph = torch.cuda.CUDAGraph() if device.type == "cuda" else None
        if self._graph is not None:
            with torch.cuda.graph(self._graph):
                self._loss = self.step()

    def step(self) -> Tensor:
        """One step from Python; gives the loss before it."""
        self._optimizer.zero_grad(set_to_none=True)
        capturing = self._x.is_cuda and torch.cuda.is_current_stream_capturing()
        with torch.autocast(self._x.device.type, torch.bfloat16, cache_enabled=not capturing):
            loss = nn.functional.cross_entropy(self._model(self._x), self._target)
        loss.backward()
        self._optimizer.step()
        return loss.detach()

    def replay(self) -> None:
        """One step, as a graph."""
        assert self._graph is not None
        self._graph.replay()

    def check(self) -> None:
        """See that the loss has fallen, in steps called one by one and in those of the graph."""
        losses = [float(self.step())]
        if self._graph is not None:
            self.replay()
            losses.append(float(self._loss))
        if not max(losses) < self._first:
            raise SystemExit(f"the loss did not fall: {self._first:.3f} to {max(losses):.3f}")


def _milliseconds(run: Callable[[], object], device: torch.device) -> float:
    """How long one run takes."""
    if device.type == "cuda":
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        end.synchronize()
        return start.elapsed_time(end)
    begin = time.perf_counter()
    run()
    return 1e3 * (time.perf_counter() - begin)
