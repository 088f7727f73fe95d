"""The tables of whole models: as ``flysurgery.optimize`` makes them, and in training."""

from __future__ import annotations

import argparse
import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import gate_cases
import recipe
import tables
import timm
import torch
from torch import Tensor, nn

import flysurgery
from flysurgery.bench import EnergyMeter, Measured, Work, in_mode, measure
from flysurgery.bench.ceilings import work_of, work_of_step
from flysurgery.bench.units import converted_timm
from flysurgery.bench.variants import VARIANTS, by_definition
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
    """What is compared: ``compiled`` adds those through ``torch.compile``, ``energy`` joules."""

    model: str
    arch: str
    mode: str
    batch: int
    compiled: bool = True
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
    cases = [
        Case(options.model, arch, mode, batch, compiled=not options.quick)
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


GRAPH = "training step, CUDA graph"
STEPS = {"training step": 1, "10 training steps": 10}
"""What is timed, and how many steps it makes."""


@dataclass(frozen=True)
class TrainingRow:
    """One candidate: ``what`` it does once or several times in a row; ``error`` is that of a gradient."""

    model: str
    arch: str
    mode: str
    batch: int
    what: str
    candidate: str
    measured: Measured


def measure_training(options: argparse.Namespace) -> None:
    """The table of a training step: forward, backward and AdamW under autocast to bfloat16."""
    table = tables.table_of(options)
    head = {"model": options.model, "arch": options.arch, "mode": "bf16", "batch": options.batch or recipe.images(options, table.device)}
    cases = [head | {"what": what} for what in (*STEPS, GRAPH)]
    records = table.make(TrainingRow, cases, partial(_training, table))
    tables.draw(options.plot, records, group=("what",), by="arch")


def _training(table: tables.Table, model: str, arch: str, mode: str, batch: int, what: str) -> list[TrainingRow]:
    """Check and time the step of each model, called from Python or as a CUDA graph."""
    with in_mode(mode) as dtype:
        case = gate_cases.Case(gate_cases.STEP, mode, batch, arch, model, own=("converted",))
        ready = gate_cases.step_runs(case, table.device, dtype)
        runs: dict[str, recipe.Run] = {
            name: partial(_several, run, STEPS.get(what, 1)) for name, run in {**ready.references, **ready.own}.items()
        }
        labels = torch.zeros(batch, dtype=torch.int64)
        module = converted_timm(model, {}, arch)
        one = {DENSE: VARIANTS["dense"](module), "converted": by_definition(module)}
        works = {name: work_of_step(each, ready.x.cpu(), labels) for name, each in one.items()}
        works = {name: Work(STEPS.get(what, 1) * work.bytes_moved, STEPS.get(what, 1) * work.flops) for name, work in works.items()}
        protocol = replace(table.protocol, launch="graph" if what == GRAPH else "eager")
        refused = {}
        if what == GRAPH and not table.on_cuda:
            runs, refused = {}, dict.fromkeys(one, tables.NEEDS_CUDA)
        given: dict[str, Any] = {"refused": refused, "works": works, "ceilings": table.ceilings(mode), "protocol": protocol}
        found = measure(runs, ready.x, ready.truths, **given)
    return [TrainingRow(model, arch, mode, batch, what, name, each) for name, each in found.items()]


def _several(run: recipe.Run, times: int, x: Tensor) -> Tensor:
    """The result of the last of several runs."""
    for _ in range(times - 1):
        run(x)
    return run(x)
