"""The tables of whole models: as ``flysurgery.optimize`` makes them, and in training."""

from __future__ import annotations

import argparse
import copy
from collections.abc import Iterator
from dataclasses import replace
from functools import cache, partial
from itertools import product
from typing import Any, cast

import energy
import recipe
import timm
import torch
from gate_cases import step_case
from torch import Tensor

import flysurgery
from flysurgery.bench import TIMED_MODES, Case, Protocol, Record, in_mode, rows_of_case
from flysurgery.bench.ceilings import Work, work_of_step
from flysurgery.bench.measuring import MEASURED
from flysurgery.bench.units import converted_timm
from flysurgery.bench.variants import by_definition, definitions, dense_copy
from flysurgery.cli.bench import TIMES
from flysurgery.cli.options import names
from flysurgery.walker import example_input

CHECKED = 8
"""Images whose outputs are held against float64."""

DENSE = "dense"
HEAD = ("model", "arch", "mode", "batch")
OPTIMIZED_COLUMNS = (*HEAD, "candidate", "fused", "joules", "joules_to_dense", *MEASURED)
"""``fused`` counts the groups of layers that became fused modules. Joules are those of the whole batch."""

TRAINING_COLUMNS = (*HEAD, "what", "candidate", *MEASURED)
"""``what`` a candidate does once or several times in a row; ``error`` is that of a gradient."""

METERED = (DENSE, "dense optimized", "optimized")
"""The candidates whose joules are measured."""

HEADLINE = ((recipe.VIT_S, "gonon", "fp16", 128), (recipe.VIT_S, "gonon", "fp16", 1), ("vit_base_patch16_224", "gonon", "fp16", 128))
"""The first of them has joules; one image is not compiled."""


def measure_optimized(options: argparse.Namespace) -> None:
    """The table of optimized models."""
    device, modes = recipe.device_and_modes(options, quick_on_cpu=True)
    batches = recipe.few(options, options.batches or (recipe.images(options, device), 1))
    archs = recipe.few(options, names(options.archs, "--archs"))
    known = [(options.model, arch, mode, batch) for batch, mode, arch in product(batches, modes, archs)]
    meter = energy.meter_or_none(device) if options.headline or options.joules else None
    jobs = []
    for case in HEADLINE if options.headline else known:
        head: Record = dict(zip(HEAD, case, strict=True))
        is_compiled = not options.quick and not (options.headline and case[-1] == 1)
        own_meter = meter if options.joules or case == HEADLINE[0] else None
        jobs.append((head, partial(optimized_rows, head, device, recipe.protocol(options, 15), own_meter, is_compiled=is_compiled)))
    recipe.make(options, device, OPTIMIZED_COLUMNS, jobs, shown=(*HEAD, "candidate", "joules", "joules_to_dense", "launch", *TIMES))


def optimized_rows(
    head: Record, device: torch.device, protocol: Protocol, meter: energy.EnergyMeter | None, *, is_compiled: bool
) -> list[Record]:
    """Check, time and meter all candidates of one case."""
    made = cache(partial(optimized_case, **head, device=device, is_compiled=is_compiled))
    rows = rows_of_case(head, made, head["mode"], protocol)
    if meter is None:
        return rows
    metered = [row["candidate"] for row in rows if row["candidate"] in METERED and row["median_ms"]]
    with in_mode(head["mode"]), torch.no_grad():
        idle, runs, x = meter.idle_watts(), cast(dict[str, recipe.Run], made().runs), made().input(DENSE)
        joules = {name: meter.measure(runs[name], x, windows=2, idle_watts=idle).joules for name in metered}
    dense = joules.get(DENSE)
    ratios = {name: own / dense for name, own in joules.items() if own and dense}
    return [row | {"joules": joules.get(row["candidate"]), "joules_to_dense": ratios.get(row["candidate"])} for row in rows]


def optimized_case(model: str, arch: str, mode: str, batch: int, *, device: torch.device, is_compiled: bool) -> Case:
    """A dense model and the same converted, each as it is and optimized; compiled ones fuse what is between groups."""
    dense, converted = timm.create_model(model, pretrained=False), converted_timm(model, {}, arch)
    # Drawn on the CPU: a graph that could not be captured leaves CUDA's generator unusable.
    x = torch.randn(batch, *cast(Tensor, example_input(dense)).shape[1:]).to(device, TIMED_MODES[mode])
    dense, converted = (each.to(device, TIMED_MODES[mode]).eval().requires_grad_(False) for each in (dense, converted))
    models = {DENSE: dense, "dense optimized": copy.deepcopy(dense), "converted": converted, "optimized": copy.deepcopy(converted)}
    twins = {DENSE: dense, "dense optimized": dense, "converted": converted, "optimized": converted}
    fused = dict.fromkeys(models, 0)
    for name in ("dense optimized", "optimized"):
        report = flysurgery.optimize(models[name], x)
        fused[name] = len(report.fused)
        print(f"{name}: {report}", flush=True)
    runs: dict[str, recipe.Run | str] = dict(models)
    if is_compiled:
        for name, of in (("dense compiled", DENSE), ("optimized compiled", "optimized")):
            runs[name], twins[name] = torch.compile(models[of]) if x.is_cuda else "left out on a CPU", twins[of]
    rows = range(min(CHECKED, batch))
    truths, works = definitions(twins, x, rows)
    return Case(runs, x, truths, rows, works, notes={"fused": fused})


GRAPH = "training step, CUDA graph"
STEPS = {"training step": 1, "10 training steps": 10, GRAPH: 1}
"""What is timed, and how many steps it makes."""


def measure_training(options: argparse.Namespace) -> None:
    """The table of a training step: forward, backward and AdamW under autocast to bfloat16."""
    device, _ = recipe.device_and_modes(options, quick_on_cpu=True)
    protocol = recipe.protocol(options, 15)

    def jobs() -> Iterator[recipe.Job]:
        for what in STEPS:
            case = {"model": options.model, "arch": options.arch, "batch": options.batch or recipe.images(options, device)}
            head = {**case, "mode": "bf16", "what": what}
            how = replace(protocol, launch="graph" if what == GRAPH else "eager")
            is_compiled = STEPS[what] == 1 and not options.quick
            make = partial(training_case, **case, what=what, device=device, is_compiled=is_compiled)
            yield head, partial(rows_of_case, head, make, "bf16", how)

    recipe.make(options, device, TRAINING_COLUMNS, jobs(), shown=("arch", "mode", "batch", "what", "candidate", "launch", *TIMES))


@torch.enable_grad()
def training_case(model: str, arch: str, batch: int, what: str, device: torch.device, *, is_compiled: bool) -> Case:
    """The step of a dense model and of the converted one, also optimized and compiled, called from Python or as a CUDA graph."""
    steps = STEPS[what]
    optimized = device.type == "cuda" and what == GRAPH
    ready = step_case(model, arch, batch, device, TIMED_MODES["bf16"], compile_too=is_compiled, optimized_too=optimized)
    runs: dict[str, Any] = {name: partial(_several, cast(recipe.Run, run), steps) for name, run in ready.runs.items()}
    if what == GRAPH and device.type != "cuda":
        runs = dict.fromkeys(ready.runs, recipe.NEEDS_CUDA)
    module, labels = converted_timm(model, {}, arch), torch.zeros(batch, dtype=torch.int64)
    plain = {DENSE: dense_copy(module), "converted": by_definition(module)}
    one = {name: work_of_step(each, ready.input(DENSE).cpu(), labels) for name, each in plain.items()}
    works = {name: one[name.removesuffix(" compiled").removesuffix(" optimized")] for name in runs}
    works = {name: Work(steps * work.bytes_moved, steps * work.flops) for name, work in works.items()}
    return replace(ready, runs=runs, works=works)


def _several(run: recipe.Run, times: int, x: Tensor) -> Tensor:
    """The result of the last of several runs."""
    for _ in range(times - 1):
        run(x)
    return run(x)
